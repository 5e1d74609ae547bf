"""What a publisher remembers of the version it announced last: the base of its next delta."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from weight_sync.codecs import Tensor
from weight_sync.codecs.changes import sampled_share
from weight_sync.config import PublishConfig
from weight_sync.core.plan import anchor_due


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of an announced version's tensors. Costs as much memory as the model."""

    number: int
    since_anchor: int
    """Deltas announced since the last anchor; 0: this is one."""
    tensors: Mapping[str, Tensor]

    def base_for(
        self,
        tensors: Sequence[Tensor],
        config: PublishConfig,
        *,
        on_changed: Callable[[float], None] = lambda share: None,
    ) -> list[Tensor] | None:
        """Return the base of these tensors, each of them; None: publish an anchor.

        Args:
            tensors: the next version.
            config: how it goes out.
            on_changed: told the estimated share of elements that changed, where it is looked at.
        """
        if anchor_due(since_anchor=self.since_anchor, anchor_every=config.anchor_every):
            return None
        if len(tensors) != len(self.tensors):
            return None
        base = []
        for tensor in tensors:
            old = self.tensors.get(tensor.name)
            if old is None or not _alike(old, tensor):
                return None
            base.append(old)
        share = sampled_share(tensors, base)
        on_changed(share)
        return base if share <= config.dense_above else None


def take_snapshot(
    older: Snapshot | None,
    tensors: Sequence[Tensor],
    *,
    number: int,
    is_anchor: bool,
    pool: Executor,
) -> Snapshot:
    """Copy an announced version, into the older copy's memory where it fits: that is lost."""
    room = older.tensors if older else {}
    copies = pool.map(lambda tensor: _copy(tensor, room.get(tensor.name)), tensors)
    since_anchor = older.since_anchor + 1 if older and not is_anchor else 0
    return Snapshot(number, since_anchor, {copy.name: copy for copy in copies})


def _copy(tensor: Tensor, room: Tensor | None) -> Tensor:
    if room is None or not _alike(room, tensor):
        memory = np.empty(tensor.data.nbytes, np.uint8)
        room = Tensor(tensor.name, tensor.dtype, tensor.shape, memory.data)
    room.words()[:] = tensor.words()
    return room


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape)
