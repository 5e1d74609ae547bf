"""A version appears whole or not at all, whatever kills its publisher, wherever."""

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from weight_sync.core.manifest import Manifest
from weight_sync.errors import ManifestError, PayloadMissing, StoreFull
from weight_sync.stores import FolderStore, open_store
from weight_sync.stores.folder import path_of


def test_reads_back_what_was_committed(versions: Any, tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    uris = [versions.put(store, 1), versions.put(store, 2)]
    other = open_store(store.uri)
    assert [version.manifest_uri for version in other.committed("run")] == uris
    for number, uri in enumerate(uris, 1):
        versions.assert_whole(store, uri, number)
    assert other.committed("another") == []
    assert other.last_number("run") == 2
    payloads = list((tmp_path / "store").rglob("*.safetensors"))
    assert len(payloads) == 2
    assert all(path.stat().st_mode & 0o222 == 0 for path in payloads)


def steps_of(versions: Any, tmp_path: Path, work: str) -> list[str]:
    steps: list[str] = []
    run_steps(versions, FolderStore(tmp_path / "record", on_step=steps.append), work)
    return steps


def run_steps(versions: Any, store: FolderStore, work: str) -> None:
    if work == "publish":
        versions.put(store, 2)
    else:
        store.remove(store.committed("run")[0])


def killed_at(versions: Any, store_path: Path, work: str, index: int) -> None:
    """Fork a child that kills itself just before its step number `index`."""
    child = os.fork()
    if child == 0:
        seen = 0

        def on_step(step: str) -> None:
            nonlocal seen
            if seen == index:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

        run_steps(versions, FolderStore(store_path, on_step=on_step), work)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_a_publisher_killed_before_any_step_leaves_a_whole_version_or_none(
    versions: Any,
    tmp_path: Path,
) -> None:
    versions.put(FolderStore(tmp_path / "record"), 1)
    steps = steps_of(versions, tmp_path, "publish")
    assert steps[0] == "mkdir"
    assert [step for step in steps if step.startswith("rename")] == [
        "rename .model.safetensors.part",
        "rename .manifest.part",
    ]
    assert sum(step.startswith("write .model") for step in steps) >= 4
    visible = []
    for index in range(len(steps)):
        store = FolderStore(tmp_path / str(index))
        first = versions.put(store, 1)
        killed_at(versions, store.root, "publish", index)
        found = store.committed("run")
        for version in found:
            versions.assert_whole(store, version.manifest_uri, version.number)
        assert found[0].manifest_uri == first
        visible.append(len(found) == 2)
        # The next publisher goes on above whatever is there, and clears what was torn.
        assert store.sweep("run", before_incarnation=2) == (0 if visible[-1] or index == 0 else 1)
        versions.assert_whole(
            store, versions.put(store, store.last_number("run") + 1, 2), 2 + visible[-1]
        )
    # The rename of the manifest is the commit point: nothing before it, everything after it.
    commit = steps.index("rename .manifest.part")
    assert visible == [index > commit for index in range(len(steps))]


def test_a_version_killed_while_it_is_removed_is_whole_or_gone(
    versions: Any, tmp_path: Path
) -> None:
    versions.put(FolderStore(tmp_path / "record"), 2)
    for index in range(len(steps_of(versions, tmp_path, "remove"))):
        store = FolderStore(tmp_path / str(index))
        versions.put(store, 2)
        killed_at(versions, store.root, "remove", index)
        for version in store.committed("run"):
            versions.assert_whole(store, version.manifest_uri, version.number)
        store.sweep("run", before_incarnation=2)
        assert len(list((store.root / "run").iterdir())) == len(store.committed("run"))


def test_a_full_disk_at_any_write_is_said_and_leaves_nothing(versions: Any, tmp_path: Path) -> None:
    versions.put(FolderStore(tmp_path / "record"), 1)
    steps = steps_of(versions, tmp_path, "publish")
    for index, step in enumerate(steps):
        if not step.startswith(("write", "sync .", "open")):
            continue
        seen: list[str] = []

        def full(step: str, seen: list[str] = seen, index: int = index) -> None:
            seen.append(step)
            if len(seen) > index:
                raise OSError(errno.ENOSPC, "No space left on device")

        store = FolderStore(tmp_path / str(index), on_step=full)
        publication = store.begin("run", 2, 1)
        with pytest.raises(StoreFull, match=r"no space left at .*Free space there"):
            versions.fill(publication, 2)
        publication.abandon()
        assert store.committed("run") == []
        assert list((store.root / "run").iterdir()) == []


def test_another_error_of_the_file_system_stays_what_it_is(versions: Any, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file, not a folder")
    with pytest.raises(NotADirectoryError):
        FolderStore(tmp_path / "store").begin("run", 1, 1)


def test_a_changed_manifest_is_refused(versions: Any, tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    uri = versions.put(store, 1)
    path = path_of(uri)
    data = path.read_bytes()
    path.chmod(0o644)
    for cut in (0, 10, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(ManifestError, match="does not match the id in the name"):
            store.read_manifest(uri)
    path.unlink()
    with pytest.raises(PayloadMissing, match="no file at"):
        store.read_manifest(uri)
    with pytest.raises(ManifestError, match="ending in manifest"):
        store.read_manifest((tmp_path / "other.json").as_uri())


def test_blanks_in_paths_survive_the_uri(versions: Any, tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "a b%c")
    uri = versions.put(store, 1)
    assert isinstance(open_store(store.uri).read_manifest(uri), Manifest)


@pytest.mark.parametrize("uri", ["relative/path", "file://host/x", ""])
def test_other_places_are_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="expected file:///absolute/path"):
        open_store(uri)


def test_a_sweep_leaves_what_is_still_written_to_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a publisher that was fenced off and does not know it yet."""
    store = FolderStore(tmp_path)
    store.begin("run", 1, 1)

    def written_to(folder: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", folder)

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", written_to)
        store.sweep("run", before_incarnation=2)
    assert store.last_number("run") == 1
    store.sweep("run", before_incarnation=2)
    assert store.last_number("run") == 0
