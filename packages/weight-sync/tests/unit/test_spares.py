"""The memory of a deleted payload is used again only where nobody can be reading it."""

import mmap
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from weight_sync.stores import MemoryStore, open_store


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    store = MemoryStore(f"test-{uuid.uuid4().hex}")
    yield store
    shutil.rmtree(store.root)


def payload_of(store: MemoryStore, number: int) -> Path:
    (path,) = store.root.glob(f"run/{number:010d}-*/model*")
    return path


def replace_version(versions: Any, store: MemoryStore, old: int, new: int) -> None:
    (version,) = [v for v in store.committed("run") if v.number == old]
    store.remove(version)
    versions.assert_whole(store, versions.put(store, new), new)


def test_a_free_payload_s_memory_is_used_again(versions: Any, store: MemoryStore) -> None:
    versions.put(store, 1)
    inode = payload_of(store, 1).stat().st_ino
    replace_version(versions, store, 1, 2)
    assert payload_of(store, 2).stat().st_ino == inode
    assert payload_of(store, 2).stat().st_mode & 0o222 == 0
    assert not (store.root / ".spare").exists()


def test_what_a_receiver_has_linked_is_left_alone(
    versions: Any, store: MemoryStore, tmp_path: Path
) -> None:
    versions.put(store, 1)
    link = store.root / "shadow"
    os.link(payload_of(store, 1), link)
    before = link.read_bytes()
    replace_version(versions, store, 1, 2)
    assert link.read_bytes() == before
    assert payload_of(store, 2).stat().st_ino != link.stat().st_ino


@pytest.mark.parametrize("mapped", [False, True])
def test_what_somebody_has_open_or_mapped_is_left_alone(
    versions: Any, store: MemoryStore, mapped: bool
) -> None:
    versions.put(store, 1)
    with payload_of(store, 1).open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if mapped else None
        before = file.read()
        if mapped:
            file.close()
        replace_version(versions, store, 1, 2)
        if memory is not None:
            assert memory[:] == before
            memory.close()
        else:
            file.seek(0)
            assert file.read() == before


def test_a_shorter_payload_has_no_tail_of_the_old_one(versions: Any, store: MemoryStore) -> None:
    versions.put(store, 1)
    store.remove(store.committed("run")[0])
    publication = store.begin("run", 2, 1)
    payload = publication.write("short", [b"abc"])
    assert (publication.folder / payload.name).read_bytes() == b"abc"
    assert payload.size_bytes == 3


def test_only_memory_is_recycled(versions: Any, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    versions.put(store, 1)
    store.remove(store.committed("run")[0])
    assert not list(tmp_path.glob(".spare"))
