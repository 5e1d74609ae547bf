"""What every store promises, wherever it keeps its bytes: a version is there whole or not."""

import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import fsspec.config
import pytest
from moto.server import ThreadedMotoServer
from weight_sync.core.manifest import PayloadFile
from weight_sync.errors import ChecksumMismatch, ManifestError, PayloadMissing
from weight_sync.stores import FolderStore, MemoryStore, Store, open_store
from weight_sync.stores.base import Step, no_step
from weight_sync.stores.object_store import ObjectStore

MakeStore = Callable[..., Store]
PART_BYTES = 5 << 20  # the least that S3 takes, and more than one part of a payload below


class Crash(BaseException):
    """A process that dies at a step: nothing after it happens."""


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """A bucket of an S3 server in this process."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    known = dict(fsspec.config.conf)
    fsspec.config.conf["s3"] = {
        "endpoint_url": f"http://{host}:{port}",
        "key": "test",
        "secret": "test",
    }
    fsspec.filesystem("s3").mkdir("weights")
    yield "s3://weights"
    fsspec.config.conf.clear()
    fsspec.config.conf.update(known)
    server.stop()


@pytest.fixture(params=["folder", "shm", "memory", "local", "s3"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeStore]:
    """Make stores on the same place, as several processes do."""
    name = f"test-{uuid.uuid4().hex}"
    roots: dict[str, str] = {
        "memory": f"memory://{name}",
        "local": (tmp_path / name).as_uri(),
    }
    if request.param == "s3":
        roots["s3"] = f"{request.getfixturevalue('bucket')}/{name}"

    def make(on_step: Step = no_step) -> Store:
        if request.param == "folder":
            return FolderStore(tmp_path / name, on_step=on_step)
        if request.param == "shm":
            return MemoryStore(name, on_step=on_step)
        return ObjectStore(roots[request.param], part_bytes=PART_BYTES, on_step=on_step)

    yield make
    if request.param == "shm":
        shutil.rmtree(MemoryStore(name).root, ignore_errors=True)


def test_reads_back_what_was_committed_in_order(versions: Any, make_store: MakeStore) -> None:
    store = make_store()
    uris = [versions.put(store, 2), versions.put(store, 10), versions.put(store, 11, incarnation=2)]
    other = make_store()
    assert [version.manifest_uri for version in other.committed("run")] == uris
    assert [version.incarnation for version in other.committed("run")] == [1, 1, 2]
    for number, uri in zip((2, 10, 11), uris, strict=True):
        versions.assert_whole(other, uri, number)
    assert other.last_number("run") == 11
    assert other.committed("another") == []
    assert other.last_number("another") == 0


# fsspec's memory shows an object while it is being written: good for tests, not for this.
@pytest.mark.parametrize("make_store", ["folder", "shm", "local", "s3"], indirect=True)
def test_a_publisher_that_dies_before_any_step_leaves_a_whole_version_or_none(
    versions: Any,
    make_store: MakeStore,
) -> None:
    steps: list[str] = []
    versions.put(make_store(steps.append), 1)
    commit = next(
        i for i, step in enumerate(steps) if step in ("rename .manifest.part", "complete manifest")
    )
    visible = []
    for index in range(len(steps)):
        number = 10 + index
        seen = 0

        def die(step: str, index: int = index) -> None:
            nonlocal seen
            if seen == index:
                raise Crash
            seen += 1

        with pytest.raises(Crash):
            versions.put(make_store(die), number)
        store = make_store()
        found = {version.number: version for version in store.committed("run")}
        visible.append(number in found)
        if number in found:
            versions.assert_whole(store, found[number].manifest_uri, number)
            store.remove(found[number])
        store.sweep("run", before_incarnation=2)
        assert store.last_number("run") == 1, "nothing of it may stay"
    assert visible == [index > commit for index in range(len(steps))]


def test_the_manifest_is_gone_before_any_payload_when_a_version_is_removed(
    versions: Any,
    make_store: MakeStore,
) -> None:
    steps: list[str] = []
    store = make_store(steps.append)
    versions.put(store, 1)
    steps.clear()
    store.remove(store.committed("run")[0])
    assert steps[0] in ("remove manifest", "delete manifest")
    assert store.committed("run") == []
    assert store.last_number("run") == 0


def test_removing_twice_is_no_error(versions: Any, make_store: MakeStore) -> None:
    store = make_store()
    versions.put(store, 1)
    (version,) = store.committed("run")
    store.remove(version)
    store.remove(version)
    assert store.committed("run") == []


def test_abandoned_work_is_gone(make_store: MakeStore) -> None:
    store = make_store()
    publication = store.begin("run", 5, 1)
    publication.write("model.safetensors", [b"bytes"])
    publication.abandon()
    assert store.last_number("run") == 0


def test_a_number_in_use_by_this_incarnation_is_refused(
    versions: Any, make_store: MakeStore
) -> None:
    store = make_store()
    versions.put(store, 5)
    with pytest.raises(FileExistsError):
        store.begin("run", 5, 1)
    late = store.begin("run", 5, 2)
    versions.assert_whole(store, versions.fill(late, 5, 2), 5)


def test_unfinished_versions_of_the_present_incarnation_are_left_alone(
    make_store: MakeStore,
) -> None:
    store = make_store()
    store.begin("run", 5, 2).write("model.safetensors", [b"bytes"])
    assert store.sweep("run", before_incarnation=2) == 0
    assert store.last_number("run") == 5
    assert store.sweep("run", before_incarnation=3) == 1


def test_what_is_gone_is_said_to_be_missing(versions: Any, make_store: MakeStore) -> None:
    store = make_store()
    uri = versions.put(store, 1)
    folder = uri.rsplit("/", 1)[0]
    payload = store.read_manifest(uri).payloads[0]
    with store.open(f"{folder}/{payload.name}") as file:
        file.seek(payload.size_bytes - 4)
        assert file.read() == b"\1" * 4
    store.remove(store.committed("run")[0])
    with pytest.raises(PayloadMissing):
        store.read_manifest(uri)
    with pytest.raises(PayloadMissing), store.open(f"{folder}/{payload.name}") as file:
        file.read()


def test_a_payload_is_read_only_as_what_it_is(versions: Any, make_store: MakeStore) -> None:
    store = make_store()
    uri = versions.put(store, 1)
    payload = store.read_manifest(uri).payloads[0]
    with pytest.raises(ManifestError, match="ending in manifest-<id>"):
        store.read_manifest(f"{uri.rsplit('/', 1)[0]}/{payload.name}")


def test_ranks_write_to_one_version_and_read_each_other_s_notes(make_store: MakeStore) -> None:
    make_store().begin("run", 5, 1)
    mine, other = make_store().join("run", 5, 1), make_store().join("run", 5, 1)
    assert other.read_note("receipt.json") is None
    mine.write_note("receipt.json", b"{}")
    assert other.read_note("receipt.json") == b"{}"
    assert make_store().committed("run") == []


def test_a_payload_that_was_cut_short_is_no_version(versions: Any) -> None:
    name = uuid.uuid4().hex

    def cut(step: str) -> None:
        # As an upload that was reported as complete and was not.
        if step.startswith("upload manifest"):
            raise AssertionError("the manifest must not be put")

    store = ObjectStore(f"memory://{name}", on_step=cut)
    publication = store.begin("run", 1, 1)
    write = publication.write

    def lose_the_tail(name: str, pieces: Iterable[bytes | memoryview]) -> PayloadFile:
        payload = write(name, pieces)
        fsspec.filesystem("memory").pipe_file(f"{publication.prefix}/{name}", b"less")
        return payload

    publication.write = lose_the_tail  # type: ignore[method-assign]
    with pytest.raises(ChecksumMismatch, match=r"sent \d+ bytes, the store holds 4"):
        versions.fill(publication, 1)
    assert store.committed("run") == []


def test_schemes_name_stores(tmp_path: Path) -> None:
    assert isinstance(open_store(str(tmp_path)), FolderStore)
    assert isinstance(open_store(tmp_path.as_uri()), FolderStore)
    assert open_store("shm://name").uri == "shm://name"
    assert open_store("memory://a/b/").uri == "memory://a/b"
    with pytest.raises(ValueError, match="expected shm:// and a name"):
        open_store("shm://../etc")
    with pytest.raises(ValueError, match="nonsense"):
        open_store("nonsense://x")
