import io
import random
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_client import EnvironmentTree
from sandbox_client.core.paths import PathRefusedError
from sandbox_client.core.trees import TreeEntry, check_tree, entry_for_file, is_digest, tree_digest

names = st.text("abc.é", min_size=1, max_size=3).filter(lambda n: n not in (".", ".."))
paths = st.lists(names, min_size=1, max_size=3).map("/".join)


@given(st.dictionaries(paths, st.binary(max_size=4), max_size=5), st.randoms())
def test_the_digest_does_not_depend_on_the_order(
    files: dict[str, bytes], shuffle: random.Random
) -> None:
    entries = [entry_for_file(path, content) for path, content in files.items()]
    try:
        digest = tree_digest(entries)
    except PathRefusedError:
        return  # a file and a folder of one name
    shuffle.shuffle(entries)
    assert tree_digest(entries) == digest
    assert is_digest(digest)


@pytest.mark.parametrize(
    "other",
    [
        EnvironmentTree({"a": b"2"}),
        EnvironmentTree({"b": b"1"}),
        EnvironmentTree({"a": b"1"}, executable=frozenset({"a"})),
        EnvironmentTree({"a": b"1"}, folders=frozenset({"d"})),
        EnvironmentTree({"a": b"1", "c": b""}),
        EnvironmentTree({}, links={"a": "1"}),
    ],
)
def test_every_difference_that_matters_changes_the_digest(other: EnvironmentTree) -> None:
    assert other.digest != EnvironmentTree({"a": b"1"}).digest


def test_the_digest_is_fixed_for_all_time() -> None:
    # Stored environments are named by it: a change would orphan them all.
    tree = EnvironmentTree({"pkg/a.py": b"x\n"}, links={"b": "pkg"}, folders=frozenset({"empty"}))
    assert tree.digest == "38840c67a13160a38e2992b8ace064f747ac6fd48fe227c15e1d782f98af214d"


@pytest.mark.parametrize(
    "entries",
    [
        [TreeEntry("a", "file"), TreeEntry("a/b", "file")],
        [TreeEntry("a", "link", target="/etc"), TreeEntry("a/b", "file")],
        [TreeEntry("a/b", "file"), TreeEntry("a", "link")],
        [TreeEntry("a", "file"), TreeEntry("a", "file")],
        [TreeEntry("../a", "file")],
        [TreeEntry("a//b", "file")],
        [TreeEntry("/a", "file")],
    ],
)
def test_what_is_no_tree_is_refused(entries: list[TreeEntry]) -> None:
    with pytest.raises(PathRefusedError):
        check_tree(entries)


def test_a_folder_and_the_same_files_in_memory_are_one_tree(tmp_path: Path) -> None:
    (tmp_path / "pkg" / "__pycache__").mkdir(parents=True)
    (tmp_path / "pkg" / "__pycache__" / "a.pyc").write_bytes(b"junk")
    (tmp_path / "pkg" / "a.py").write_bytes(b"x")
    (tmp_path / "run.sh").write_bytes(b"#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "link").symlink_to("pkg/a.py")
    read = EnvironmentTree.from_folder(tmp_path)
    made = EnvironmentTree(
        {"pkg/a.py": b"x", "run.sh": b"#!/bin/sh\n"},
        executable=frozenset({"run.sh"}),
        links={"link": "pkg/a.py"},
    )
    assert read.digest == made.digest


def test_the_archive_is_the_same_bytes_every_time_and_complete() -> None:
    tree = EnvironmentTree({"b": b"2", "a/x": b"1"}, executable=frozenset({"b"}))
    assert (
        tree.tar_bytes() == EnvironmentTree({"a/x": b"1", "b": b"2"}, frozenset({"b"})).tar_bytes()
    )
    with tarfile.open(fileobj=io.BytesIO(tree.tar_bytes())) as tar:
        assert {m.name: m.mode for m in tar if m.isfile()} == {"a/x": 0o644, "b": 0o755}
