import io
import os
import tarfile
from pathlib import Path

import pytest
from sandbox_client import EnvironmentTree, TooLarge, WrongRequest
from sandbox_client.backends.local.store import EMPTY_DIGEST, EnvironmentStore


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "environments"


def opened(folder: Path, max_bytes: int = 1 << 20) -> EnvironmentStore:
    store = EnvironmentStore(
        folder, uid=os.getuid(), gid=os.getgid(), max_bytes=max_bytes, clock=Clock()
    )
    store.open()
    return store


def put(store: EnvironmentStore, tree: EnvironmentTree, archive: bytes | None = None) -> None:
    partial = store.partial_folder()
    data = tree.tar_bytes() if archive is None else archive
    store.adopt(tree.digest, partial, store.unpack(io.BytesIO(data), tree.digest, partial))


TREE = EnvironmentTree(
    {"a.py": b"1", "pkg/b.sh": b"2"},
    executable=frozenset({"pkg/b.sh"}),
    links={"l": "a.py"},
    folders=frozenset({"e"}),
)


def test_a_stored_tree_has_its_content_with_fixed_modes_and_times(folder: Path) -> None:
    store = opened(folder)
    put(store, TREE)
    root = store.tree(TREE.digest)
    assert (root / "a.py").read_bytes() == b"1"
    assert (root / "l").readlink() == Path("a.py")
    assert (root / "e").is_dir()
    modes = {p.name: p.stat().st_mode & 0o777 for p in root.rglob("*") if not p.is_symlink()}
    assert modes == {"a.py": 0o644, "b.sh": 0o755, "pkg": 0o755, "e": 0o755}
    assert {p.lstat().st_mtime for p in root.rglob("*")} == {1_600_000_000}
    assert EnvironmentTree.from_folder(root).digest == TREE.digest
    assert (folder / TREE.digest).stat().st_mode & 0o077 == 0


def test_what_is_stored_is_there_after_a_restart_and_half_done_work_is_not(folder: Path) -> None:
    store = opened(folder)
    put(store, TREE)
    (store.partial_folder() / "tree" / "half").write_text("x")
    again = opened(folder)
    assert TREE.digest in again
    assert EMPTY_DIGEST in again
    assert again.size_bytes >= store.size_bytes
    assert {p.name for p in folder.iterdir()} == {TREE.digest, EMPTY_DIGEST}


def test_content_that_is_not_what_it_claims_is_refused(folder: Path) -> None:
    store = opened(folder)
    other = EnvironmentTree({"a.py": b"other"})
    with pytest.raises(WrongRequest, match=other.digest):
        put(store, TREE, other.tar_bytes())
    with pytest.raises(WrongRequest, match="tar"):
        put(store, TREE, b"nonsense" * 200)
    with pytest.raises(WrongRequest):
        put(store, TREE, TREE.tar_bytes()[:700])
    assert TREE.digest not in store


def test_a_file_in_place_of_a_folder_is_refused(folder: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in ("a/b", "a"):
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))
    with pytest.raises(WrongRequest, match="cannot be stored"):
        put(opened(folder), TREE, out.getvalue())


def trees(count: int) -> list[EnvironmentTree]:
    return [EnvironmentTree({"f": bytes([n]) * 100}) for n in range(count)]


def test_the_least_recently_used_go_first_when_space_runs_out(folder: Path) -> None:
    store = opened(folder, max_bytes=250)
    first, second, third = trees(3)
    put(store, first)
    put(store, second)
    with store.reserve(first.digest):
        pass  # used again
    put(store, third)
    assert [t.digest in store for t in (first, second, third)] == [True, False, True]
    assert not (folder / second.digest).exists()


def test_what_is_in_use_is_never_evicted(folder: Path) -> None:
    store = opened(folder, max_bytes=150)
    first, second, third = trees(3)
    put(store, first)
    with store.reserve(first.digest):
        put(store, second)
        assert first.digest in store
    put(store, third)
    assert first.digest not in store


def test_a_tree_larger_than_the_store_is_refused(folder: Path) -> None:
    with pytest.raises(TooLarge, match="environments_bytes"):
        put(opened(folder, max_bytes=50), trees(1)[0])


def test_putting_twice_changes_nothing(folder: Path) -> None:
    store = opened(folder)
    put(store, TREE)
    put(store, TREE)
    assert {p.name for p in folder.iterdir()} == {TREE.digest, EMPTY_DIGEST}


def packed_folder(*members: tuple[str, bytes, str]) -> io.BytesIO:
    """A folder as the Engine API packs it: (name, type, content or target)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind, text in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, 0o755
            info.linkname = text if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            info.size = len(text) if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(text.encode()))
    out.seek(0)
    return out


async def test_an_images_folder_is_stored_as_the_tree_that_it_is(folder: Path) -> None:
    store = opened(folder)
    archive = packed_folder(
        ("testbed/", tarfile.DIRTYPE, ""),
        ("testbed/run.sh", tarfile.REGTYPE, "one"),
        ("testbed/pkg/", tarfile.DIRTYPE, ""),
        ("testbed/pkg/same.sh", tarfile.LNKTYPE, "testbed/run.sh"),
        ("testbed/l", tarfile.SYMTYPE, "/etc/passwd"),
        ("testbed/device", tarfile.CHRTYPE, ""),
        ("testbed/pipe", tarfile.FIFOTYPE, ""),
    )
    expected = EnvironmentTree(
        {"run.sh": b"one", "pkg/same.sh": b"one"},
        executable=frozenset({"run.sh", "pkg/same.sh"}),
        links={"l": "/etc/passwd"},
    )
    assert await store.put_image_folder(archive) == expected.digest
    assert EnvironmentTree.from_folder(store.tree(expected.digest)).digest == expected.digest


@pytest.mark.parametrize(
    "members",
    [
        [("w/a", tarfile.LNKTYPE, "/etc/shadow")],
        [("w/a", tarfile.LNKTYPE, "w/../../etc/shadow")],
        [("w/l", tarfile.SYMTYPE, "/etc"), ("w/a", tarfile.LNKTYPE, "w/l/shadow")],
        [("w/l", tarfile.SYMTYPE, "/etc"), ("w/l/x", tarfile.REGTYPE, "x")],
        [("w/../../x", tarfile.REGTYPE, "x")],
    ],
)
async def test_an_image_cannot_store_anything_outside_its_folder(
    folder: Path, members: list[tuple[str, bytes, str]]
) -> None:
    store = opened(folder)
    with pytest.raises(WrongRequest, match="cannot be stored"):
        await store.put_image_folder(packed_folder(*members))
    assert os.listdir(folder) == [EMPTY_DIGEST]  # noqa: PTH208 -- an asynchronous test
