"""The walk over an overlay's upper layer, while a command changes it under the walk's eyes."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from sandbox_client.backends.local.work_diff import work_diff


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    folder = tmp_path / "upper"
    folder.mkdir()
    (folder / "other.txt").write_text("other\n")
    return folder


def diff(upper: Path) -> str:
    lower = upper.parent / "lower"
    lower.mkdir(exist_ok=True)
    fd = os.open(upper, os.O_RDONLY | os.O_DIRECTORY)
    try:
        made = work_diff(fd, lower, exclude=(), max_bytes=10_000, opaque_mark="user.opaque")
    finally:
        os.close(fd)
    return made.decode()


def test_a_link_that_has_become_a_file_is_left_out(
    upper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (upper / "x").symlink_to("target")
    assert "target" in diff(upper)  # the control
    readlink = os.readlink

    def late(name: str, *, dir_fd: int | None = None) -> str:
        os.unlink(name, dir_fd=dir_fd)
        (upper / name).write_text("a file now")
        return readlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "readlink", late)
    assert "a/x" not in diff(upper)
    (upper / "x").unlink()
    (upper / "x").symlink_to("target")
    assert "+other" in diff(upper)


@pytest.mark.parametrize("kind", ["pipe", "link", "gone"])
def test_a_file_that_has_become_another_thing_is_left_out(
    upper: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (upper / "x").write_text("a file\n")
    assert "+a file" in diff(upper)  # the control
    look = os.stat

    def early(name: str, **options: Any) -> os.stat_result:
        found = look(name, **options)
        if name == "x":
            (upper / "x").unlink()
            if kind == "pipe":
                os.mkfifo(upper / "x")
            elif kind == "link":
                (upper / "x").symlink_to("/etc/passwd")
        return found

    monkeypatch.setattr(os, "stat", early)
    made = diff(upper)
    assert "a/x" not in made
    assert "root:" not in made
    assert "+other" in made


def test_other_errors_are_not_swallowed(upper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (upper / "x").symlink_to("target")

    def broken(name: str, *, dir_fd: int | None = None) -> str:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(os, "readlink", broken)
    with pytest.raises(OSError, match="broken disk"):
        diff(upper)
