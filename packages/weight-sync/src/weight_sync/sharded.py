"""Publishing from several trainer ranks: each writes its own part, one commits.

    ticket = await publisher.begin_shards(shards=4, step=7)     # rank 0
    write_shard(ticket, rank, my_tensors)                       # every rank, 0 too
    version = await publisher.commit_shards(ticket)             # rank 0

Two phases: a rank's payload is durable before its receipt is, and the manifest is written once
every receipt is there. A rank that dies leaves a receipt missing; the coordinator then gives the
version up, and nobody ever sees it. A coordinator that dies leaves no manifest: the same.
"""

import time
from collections.abc import Callable, Mapping

from weight_sync.codecs import safetensors_file
from weight_sync.core.manifest import Manifest, build_manifest
from weight_sync.core.shards import ShardReceipt, ShardTicket, joined
from weight_sync.errors import ShardMissing
from weight_sync.stores import Publication, Store, open_store
from weight_sync.tensors import TensorLike, raw_tensor

__all__ = ["ShardReceipt", "ShardTicket", "collect_shards", "write_shard"]

_CODEC = "dense"
_POLL_S = 0.02


def write_shard(
    ticket: ShardTicket, rank: int, tensors: Mapping[str, TensorLike], store: Store | None = None
) -> ShardReceipt:
    """Write this rank's tensors, each whole and no other rank's, and vouch for them.

    Blocks; the tensors must not change before it returns. It may be called again after it failed.

    Args:
        ticket: from the coordinator.
        rank: this one, from 0.
        tensors: as for `Publisher.publish`; there may be none.
        store: None: the one the ticket names.

    Raises:
        StoreFull: no space is left.
        FileNotFoundError: the coordinator has given the version up.
        ValueError: a tensor is not what its label says.
    """
    store = store or open_store(ticket.store_uri)
    publication = store.join(ticket.run, ticket.number, ticket.incarnation)
    raw = safetensors_file.in_file_order([raw_tensor(n, value) for n, value in tensors.items()])
    pieces: list[bytes | memoryview] = [
        safetensors_file.header(raw),
        *(tensor.data for tensor in raw),
    ]
    name = ticket.name(rank)
    payload = publication.write(f"model-{name}.safetensors", pieces)
    receipt = ShardReceipt(tuple(tensor.entry() for tensor in raw), payload)
    publication.write_note(f"receipt-{name}.json", receipt.to_bytes())
    return receipt


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
        codec=_CODEC,
        tensors=joined(ordered),
        payloads=[receipt.payload for receipt in ordered],
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
