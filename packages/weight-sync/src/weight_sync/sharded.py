"""Publishing from several trainer ranks: each writes its own part, one commits.

    ticket = await publisher.begin_shards(shards=4, step=7)     # rank 0
    writer.write(ticket, my_tensors)                            # every rank its ShardWriter, 0 too
    version = await publisher.commit_shards(ticket)             # rank 0

Two phases: a rank's payload is durable before its receipt is, and the manifest is written once
every receipt is there. A rank that dies leaves a receipt missing; the coordinator then gives the
version up, and nobody ever sees it. A coordinator that dies leaves no manifest: the same.

A version goes out as deltas if the coordinator says so: each rank keeps a copy of its own tensors.
After a version that was given up comes an anchor, for which no rank needs its copy.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from weight_sync.codecs import Dense, Tensor, delta_codec
from weight_sync.config import PublishConfig
from weight_sync.core.manifest import Manifest, build_manifest
from weight_sync.core.shards import ShardReceipt, ShardTicket, joined
from weight_sync.errors import AnchorRequired, ShardMissing
from weight_sync.snapshot import Snapshot, take_snapshot
from weight_sync.stores import Publication, Store, open_store
from weight_sync.tensors import TensorLike, raw_tensor

__all__ = ["ShardReceipt", "ShardTicket", "ShardWriter", "collect_shards"]

_POLL_S = 0.02


class ShardWriter:
    """One rank's part in version after version. Not for several threads at once."""

    def __init__(
        self, rank: int, *, config: PublishConfig | None = None, store: Store | None = None
    ) -> None:
        """Write for a rank.

        Args:
            rank: this one, from 0.
            config: its `dense_above` and `threads`; when and how deltas go out is the
                coordinator's to say.
            store: None: the one that a ticket names.
        """
        self._rank = rank
        self._config = config or PublishConfig()
        self._store = store
        self._snapshot: Snapshot | None = None

    def write(self, ticket: ShardTicket, tensors: Mapping[str, TensorLike]) -> ShardReceipt:
        """Write this rank's tensors, each whole and no other rank's, and vouch for them.

        Blocks; the tensors must not change before it returns. It may be called again after it
        failed.

        Args:
            ticket: from the coordinator.
            tensors: as for `Publisher.publish`; there may be none.

        Raises:
            AnchorRequired: this rank has no copy of the version that the changes are to be sent
                since. The coordinator gives the version up, and begins the next with an anchor.
            StoreFull: no space is left.
            FileNotFoundError: the coordinator has given the version up.
            ValueError: a tensor is not what its label says, or not what it was in the base.
        """
        store = self._store or open_store(ticket.store_uri)
        publication = store.join(ticket.run, ticket.number, ticket.incarnation)
        raw = [raw_tensor(name, value) for name, value in tensors.items()]
        name = ticket.name(self._rank)
        with ThreadPoolExecutor(self._config.threads, "weight-sync") as pool:
            payload = None
            if not ticket.base:
                payload = publication.write(f"model-{name}.safetensors", Dense().encode(raw))
            elif raw:
                codec = delta_codec(ticket.codec, dense_above=self._config.dense_above)
                pieces = codec.encode(raw, self._base(ticket), pool, part=True)
                payload = publication.write(f"delta-{name}.bin", pieces)
            receipt = ShardReceipt(tuple(pool.map(Tensor.entry, raw)), payload)
            if ticket.codec != Dense.id:
                older, self._snapshot = self._snapshot, None
                self._snapshot = take_snapshot(
                    older, raw, number=ticket.number, is_anchor=not ticket.base, pool=pool
                )
        publication.write_note(f"receipt-{name}.json", receipt.to_bytes())
        return receipt

    def _base(self, ticket: ShardTicket) -> Sequence[Tensor]:
        held = self._snapshot.number if self._snapshot else 0
        if self._snapshot is None or held != ticket.base:
            raise AnchorRequired(
                f"rank {self._rank} was to send version {ticket.number} as changes since version "
                f"{ticket.base}, and holds {f'version {held}' if held else 'no version'}. Give it "
                "up: an anchor follows"
            )
        return list(self._snapshot.tensors.values())


def collect_shards(
    ticket: ShardTicket,
    store: Store,
    *,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Manifest, str]:
    """Wait for every rank's receipt, then commit; return the manifest and its URI. Blocks.

    Raises:
        ShardMissing: a rank was late; what the others wrote is deleted.
        ManifestError: two ranks wrote the same tensor.
    """
    publication = store.join(ticket.run, ticket.number, ticket.incarnation)
    try:
        manifest = _collected(ticket, publication, timeout_s, clock, sleep)
        return manifest, publication.commit(manifest)
    except BaseException:
        publication.abandon()
        raise


def _collected(
    ticket: ShardTicket,
    publication: Publication,
    timeout_s: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> Manifest:
    receipts: dict[int, ShardReceipt] = {}
    ends_s = clock() + timeout_s
    while missing := _look(ticket, publication, receipts):
        if clock() >= ends_s:
            raise ShardMissing(
                f"version {ticket.number}: no shard from ranks {missing} within "
                f"{timeout_s:g} s; the version is given up. See what became of them, then "
                "publish again"
            )
        sleep(_POLL_S)
    ordered = [receipts[rank] for rank in range(ticket.shards)]
    return build_manifest(
        run=ticket.run,
        incarnation=ticket.incarnation,
        number=ticket.number,
        step=ticket.step,
        parent=ticket.parent,
        base=ticket.base,
        codec=ticket.codec if ticket.base else Dense.id,
        tensors=joined(ordered),
        payloads=[receipt.payload for receipt in ordered if receipt.payload is not None],
    )


def _look(
    ticket: ShardTicket, publication: Publication, receipts: dict[int, ShardReceipt]
) -> list[int]:
    """Take in receipts that came since; return the ranks that still owe one."""
    for rank in set(range(ticket.shards)) - receipts.keys():
        data = publication.read_note(f"receipt-{ticket.name(rank)}.json")
        if data is not None:
            receipts[rank] = ShardReceipt.from_bytes(data)
    return sorted(set(range(ticket.shards)) - receipts.keys())
