"""A version of several ranks is there once all have written their part, and never before."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from weight_sync.codecs import Tensor, safetensors_file
from weight_sync.core.manifest import PayloadFile, TensorEntry, digest
from weight_sync.core.shards import ShardReceipt, ShardTicket, assign_owners, joined
from weight_sync.errors import ManifestError, ShardMissing
from weight_sync.sharded import ShardWriter, collect_shards
from weight_sync.stores import FolderStore

NEVER = 0.0


def begun(store: FolderStore, shards: int = 3, number: int = 1) -> ShardTicket:
    store.begin("run", number, 1)
    ticket = ShardTicket(
        run="run",
        incarnation=1,
        number=number,
        step=7,
        parent=0,
        shards=shards,
        store_uri=store.uri,
    )
    return ShardTicket.from_json(ticket.to_json())  # as it reaches the ranks


def part(rank: int) -> dict[str, "np.ndarray[tuple[int], np.dtype[np.float32]]"]:
    return {f"layer.{rank}.{n}": np.full(5, 10 * rank + n, np.float32) for n in range(2)}


def test_the_version_has_every_rank_s_tensors(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    ticket = begun(store)
    for rank in (2, 0, 1):
        ShardWriter(rank).write(ticket, part(rank))
    manifest, uri = collect_shards(ticket, store, timeout_s=NEVER)
    assert store.read_manifest(uri) == manifest
    assert (manifest.version.step, manifest.is_anchor, len(manifest.payloads)) == (7, True, 3)
    found: dict[str, Tensor] = {}
    for payload in manifest.payloads:
        data = store.read_bytes(f"{uri.rsplit('/', 1)[0]}/{payload.name}")
        found |= {tensor.name: tensor for tensor in safetensors_file.tensors(memoryview(data))}
    assert set(found) == {name for rank in range(3) for name in part(rank)}
    for entry in manifest.tensors:
        found[entry.name].verify(entry)


def test_a_rank_may_own_nothing(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    ticket = begun(store, shards=2)
    ShardWriter(0).write(ticket, part(0))
    ShardWriter(1).write(ticket, {})
    manifest, _ = collect_shards(ticket, store, timeout_s=NEVER)
    assert [entry.name for entry in manifest.tensors] == sorted(part(0))


def test_a_missing_rank_means_no_version_and_no_leftovers(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    ticket = begun(store)
    ShardWriter(0).write(ticket, part(0))
    ShardWriter(2).write(ticket, part(2))
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    with pytest.raises(ShardMissing, match=r"no shard from ranks \[1\] within 5 s") as refused:
        collect_shards(ticket, store, timeout_s=5, clock=lambda: now_s[0], sleep=sleep)
    assert refused.value.retryable
    assert now_s[0] == pytest.approx(5, abs=0.1)
    assert store.committed("run") == []
    assert list((tmp_path / "run").iterdir()) == []
    # A rank that comes later learns of it, and makes no version either.
    with pytest.raises(FileNotFoundError):
        ShardWriter(1).write(ticket, part(1))


def test_a_rank_killed_before_any_of_its_steps_leaves_no_version(tmp_path: Path) -> None:
    steps: list[str] = []
    store = FolderStore(tmp_path / "record")
    ShardWriter(1, store=FolderStore(store.root, on_step=steps.append)).write(begun(store), part(1))
    assert steps[-1].startswith("sync folder")
    receipt = next(i for i, step in enumerate(steps) if step.startswith("rename .receipt"))
    for index in range(len(steps)):
        store = FolderStore(tmp_path / str(index))
        ticket = begun(store, shards=2)
        ShardWriter(0).write(ticket, part(0))
        child = os.fork()
        if child == 0:
            seen = 0

            def on_step(step: str, index: int = index) -> None:
                nonlocal seen
                if seen == index:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

            ShardWriter(1, store=FolderStore(store.root, on_step=on_step)).write(ticket, part(1))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        if index <= receipt:
            with pytest.raises(ShardMissing):
                collect_shards(ticket, store, timeout_s=NEVER)
            assert store.committed("run") == []
        else:
            collect_shards(ticket, store, timeout_s=NEVER)
            assert len(store.committed("run")) == 1


def test_the_coordinator_waits_for_ranks_that_are_slow(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    ticket = begun(store, shards=2)
    ShardWriter(0).write(ticket, part(0))
    waits = iter([None, None, "now"])

    def sleep(_seconds: float) -> None:
        if next(waits):
            ShardWriter(1).write(ticket, part(1))

    manifest, _ = collect_shards(ticket, store, timeout_s=60, clock=time.monotonic, sleep=sleep)
    assert len(manifest.payloads) == 2


def test_two_owners_of_one_tensor_are_refused(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    ticket = begun(store, shards=2)
    ShardWriter(0).write(ticket, part(0))
    ShardWriter(1).write(ticket, part(0))
    with pytest.raises(ManifestError, match=r"layer\.0\.0 was written by ranks 0 and 1"):
        collect_shards(ticket, store, timeout_s=NEVER)
    assert store.committed("run") == []


def test_a_rank_that_is_none_is_refused(tmp_path: Path) -> None:
    ticket = begun(FolderStore(tmp_path))
    for rank in (-1, 3):
        with pytest.raises(ManifestError, match="expected a rank below 3"):
            ShardWriter(rank).write(ticket, {})
    for text in ("", "[]", '{"run": "x"}'):
        with pytest.raises(ManifestError, match="expected a shard's ticket"):
            ShardTicket.from_json(text)
    for data in (b"", b"[]", b'{"tensors": [["x"]], "payload": []}'):
        with pytest.raises(ManifestError, match="receipt makes no sense"):
            ShardReceipt.from_bytes(data)


@given(st.dictionaries(st.text(max_size=5), st.integers(0, 1000)), st.integers(1, 9))
def test_owners_are_the_same_everywhere_and_share_the_load(
    sizes: dict[str, int], ranks: int
) -> None:
    owners = assign_owners(sizes, ranks)
    assert owners == assign_owners(dict(reversed(sizes.items())), ranks)
    assert owners.keys() == sizes.keys()
    load = [sum(s for n, s in sizes.items() if owners[n] == rank) for rank in range(ranks)]
    # No rank has more than another by more than the largest tensor.
    assert max(load) - min(load) <= max(sizes.values(), default=0)


names = st.text(st.characters(codec="ascii", categories=["L"]), min_size=1, max_size=8)


@given(st.lists(st.lists(names, max_size=4), min_size=1, max_size=4))
def test_shards_join_exactly_when_no_tensor_has_two_owners(shards: list[list[str]]) -> None:
    receipts = [
        ShardReceipt(
            tuple(TensorEntry(n, "U8", (1,), digest(n.encode())) for n in shard),
            PayloadFile(f"p{i}", 0, digest(b"")) if shard else None,
        )
        for i, shard in enumerate(shards)
    ]
    assert [ShardReceipt.from_bytes(r.to_bytes()) for r in receipts] == receipts
    everything = [name for shard in shards for name in shard]
    if len(everything) == len(set(everything)):
        assert [tensor.name for tensor in joined(receipts)] == everything
    else:
        with pytest.raises(ManifestError, match="each tensor needs one owner"):
            joined(receipts)
