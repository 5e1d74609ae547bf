"""A version that several ranks write: who writes what, and what each vouches for."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weight_sync.core.manifest import PayloadFile, TensorEntry
from weight_sync.errors import ManifestError


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTicket:
    """What a rank must know to write its part. The coordinator makes it; it travels as JSON."""

    run: str
    incarnation: int
    number: int
    step: int
    parent: int
    shards: int
    """Ranks that write, from 0."""
    store_uri: str
    base: int = 0
    """The version to send the changes since; 0: send everything."""
    since_anchor: int = 0
    """Deltas since the last anchor, this version's included."""
    codec: str = "dense"
    """How changes are sent, of this version or the next; `dense`: never."""

    def to_json(self) -> str:
        """Return the text to hand to the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "ShardTicket":
        """Read what the coordinator handed out.

        Raises:
            ManifestError: it is no ticket.
        """
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise ManifestError(
                f"expected a shard's ticket as the coordinator made it, found {text!r}: {error}"
            ) from error

    def name(self, rank: int) -> str:
        """Return what a rank's files are called, without suffix; ranks count from 1 in it."""
        if not 0 <= rank < self.shards:
            raise ManifestError(f"expected a rank below {self.shards}, found {rank}")
        return f"{rank + 1:05d}-of-{self.shards:05d}"


@dataclass(frozen=True, slots=True)
class ShardReceipt:
    """What one rank has written, all of it in the store."""

    tensors: tuple[TensorEntry, ...]
    payload: PayloadFile | None
    """None: a rank without tensors has no changes."""

    def to_bytes(self) -> bytes:
        """Return it as JSON."""
        tensors = [[t.name, t.dtype, list(t.shape), t.checksum] for t in self.tensors]
        file = self.payload
        payload = [file.name, file.size_bytes, file.checksum] if file else None
        return json.dumps({"tensors": tensors, "payload": payload}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "ShardReceipt":
        """Read a receipt.

        Raises:
            ManifestError: it is none.
        """
        try:
            fields: Mapping[str, Any] = json.loads(data)
            tensors = tuple(
                TensorEntry(name, dtype, tuple(shape), checksum)
                for name, dtype, shape, checksum in fields["tensors"]
            )
            payload = fields["payload"]
            return cls(tensors, None if payload is None else PayloadFile(*payload))
        except (ValueError, TypeError, KeyError) as error:
            raise ManifestError(f"a shard's receipt makes no sense: {error!r}") from error


def joined(receipts: Sequence[ShardReceipt]) -> list[TensorEntry]:
    """Return the tensors of all shards.

    Raises:
        ManifestError: two ranks wrote the same tensor.
    """
    owner: dict[str, int] = {}
    for rank, receipt in enumerate(receipts):
        for tensor in receipt.tensors:
            if tensor.name in owner:
                raise ManifestError(
                    f"tensor {tensor.name} was written by ranks {owner[tensor.name]} and {rank}; "
                    "each tensor needs one owner, see assign_owners"
                )
            owner[tensor.name] = rank
    return [tensor for receipt in receipts for tensor in receipt.tensors]


def assign_owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Give each tensor one rank that writes it, so that all write about equally much.

    Every rank computes the same. A rank whose framework shards tensors themselves gathers those it
    owns, one at a time: no rank ever holds the whole model.

    Args:
        sizes: bytes by name, of every tensor.
        ranks: at least 1.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    load = [0] * ranks
    owners = {}
    # The largest first: what comes last is small and evens out.
    for name, size in _largest_first(sizes.items()):
        rank = load.index(min(load))
        owners[name] = rank
        load[rank] += size
    return owners


def _largest_first(sizes: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(sizes, key=lambda item: (-item[1], item[0]))
