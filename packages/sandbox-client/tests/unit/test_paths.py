import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_client.core.paths import (
    PathRefusedError,
    check_mount_point,
    normalize,
    relative_parts,
)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a.py", "/workspace/a.py"),
        ("./a//b", "/workspace/a/b"),
        ("a/../b", "/workspace/b"),
        (".", "/workspace"),
        ("/tmp/x", "/tmp/x"),
        ("//tmp/./x", "/tmp/x"),
    ],
)
def test_paths_are_taken_from_the_work_folder(path: str, expected: str) -> None:
    assert normalize(path, base="/workspace") == expected


@pytest.mark.parametrize(
    "path", ["", "../x", "a/../../x", "/..", "/tmp/../../x", "a\0b", "x" * 300, "y/" * 3000]
)
def test_paths_that_leave_or_cannot_be_are_refused(path: str) -> None:
    with pytest.raises(PathRefusedError):
        normalize(path, base="/workspace")


@given(st.lists(st.sampled_from(["..", ".", "a", "b", ""]), max_size=8).map("/".join))
def test_a_relative_path_never_leaves_the_work_folder(path: str) -> None:
    try:
        found = normalize(path, base="/workspace")
    except PathRefusedError:
        return
    if not path.startswith("/"):
        assert found == "/workspace" or found.startswith("/workspace/")


@pytest.mark.parametrize("path", ["/abs", "a/../b", "..", ""])
def test_members_of_a_tree_are_relative_and_never_climb(path: str) -> None:
    with pytest.raises(PathRefusedError):
        relative_parts(path)


@pytest.mark.parametrize("path", ["/", "work", "/usr/x", "/etc", "/a/", "/a/../b", "/.hidden"])
def test_system_folders_cannot_be_mounted_over(path: str) -> None:
    with pytest.raises(PathRefusedError):
        check_mount_point(path)


def test_an_ordinary_folder_can_be_mounted() -> None:
    assert check_mount_point("/testbed/repo") == "/testbed/repo"
