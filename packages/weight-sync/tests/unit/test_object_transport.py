"""Payloads out of an object store arrive whole, or leave nothing."""

import errno
import os
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
from weight_sync.core.manifest import digest
from weight_sync.errors import ChecksumMismatch, PayloadMissing, StoreFull
from weight_sync.stores.object_store import ObjectStore
from weight_sync.transports import StoreTransport, object_store
from weight_sync.transports.base import Fetched
from weight_sync.transports.object_store import ObjectTransport


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore(f"memory://{uuid.uuid4().hex}")


@pytest.fixture(autouse=True)
def short_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_RANGE_BYTES", 100_000)


def payload_path(uri: str) -> str:
    return f"{uri.rsplit('/', 1)[0]}/model.safetensors"


def test_ranges_are_put_together_in_order(
    versions: Any, store: ObjectStore, tmp_path: Path
) -> None:
    uri = versions.put(store, 1)
    data = os.urandom(1_234_567)
    publication = store.join("run", 2, 1)
    payload = publication.write("random", [data])
    for transport in (ObjectTransport(store), StoreTransport()):
        into = tmp_path / type(transport).__name__
        assert transport.read_manifest(uri).version.number == 1
        found = transport.fetch(f"{store.uri}/run/0000000002-0001/manifest", payload, into)
        assert found == Fetched(into, len(data))
        assert into.read_bytes() == data


def test_a_flipped_bit_is_noticed_and_leaves_nothing(
    versions: Any, store: ObjectStore, tmp_path: Path
) -> None:
    uri = versions.put(store, 1)
    payload = store.read_manifest(uri).payloads[0]
    data = bytearray(store.read_bytes(payload_path(uri)))
    data[len(data) // 2] ^= 4
    fsspec.filesystem("memory").pipe_file(payload_path(uri), bytes(data))
    with pytest.raises(ChecksumMismatch, match="expected checksum"):
        ObjectTransport(store).fetch(uri, payload, tmp_path / "x")
    fsspec.filesystem("memory").pipe_file(payload_path(uri), bytes(data[:-1]))
    with pytest.raises(ChecksumMismatch, match=r"expected \d+ bytes"):
        ObjectTransport(store).fetch(uri, payload, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_what_was_pruned_is_missing(versions: Any, store: ObjectStore, tmp_path: Path) -> None:
    uri = versions.put(store, 1)
    payload = store.read_manifest(uri).payloads[0]
    store.remove(store.committed("run")[0])
    with pytest.raises(PayloadMissing):
        ObjectTransport(store).fetch(uri, payload, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_known_before_a_byte_is_moved(
    versions: Any, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = versions.put(store, 1)
    payload = store.read_manifest(uri).payloads[0]

    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(store, "read_range", None)  # never called
    with pytest.raises(StoreFull, match="Free space there, or set"):
        ObjectTransport(store).fetch(uri, payload, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_payload_arrives(store: ObjectStore, tmp_path: Path) -> None:
    payload = store.join("run", 1, 1).write("empty", [])
    assert payload.checksum == digest(b"")
    ObjectTransport(store).fetch(f"{store.uri}/run/0000000001-0001/m", payload, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b""
