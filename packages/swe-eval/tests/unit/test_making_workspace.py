"""What a run of tests leaves behind is gone before the next."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from swe_eval.making.workspace import Workspace


def look(folder: Path) -> dict[str, tuple[int, bytes | str]]:
    """Everything below a folder: mode, and content or target."""
    found: dict[str, tuple[int, bytes | str]] = {}
    for path in sorted(folder.rglob("*")):
        name, mode = str(path.relative_to(folder)), path.lstat().st_mode
        if path.is_symlink():
            found[name] = (mode, str(path.readlink()))
        else:
            found[name] = (mode, path.read_bytes() if path.is_file() else b"")
    return found


def rewrite_unseen(repo: Path) -> None:
    file = repo / "a/one.py"
    status = file.stat()
    file.write_text("x = 2\n")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def close_folder(repo: Path) -> None:
    (repo / "made/deep").mkdir(parents=True)
    (repo / "made/deep/file").write_text("")
    (repo / "made/deep").chmod(0)
    (repo / "made").chmod(0o500)


def swap(repo: Path) -> None:
    shutil.rmtree(repo / "a")
    (repo / "a").write_text("")
    (repo / "two.py").unlink()
    (repo / "two.py").mkdir()
    (repo / "link").unlink()
    (repo / "link").symlink_to("elsewhere")


CHANGES: dict[str, Callable[[Path], object]] = {
    "new folder": lambda repo: (repo / "c3").mkdir(),
    "closed folder": close_folder,
    "new link": lambda repo: (repo / "lnk").symlink_to("a"),
    "link to nowhere": lambda repo: (repo / "lnk").symlink_to("absent"),
    "link out": lambda repo: (repo / "lnk").symlink_to(repo.parent / "keep"),
    "file with its old time": rewrite_unseen,
    "another mode": lambda repo: (repo / "two.py").chmod(0o777),
    "folder closed": lambda repo: (repo / "a").chmod(0o500),
    "empty folder gone": lambda repo: (repo / "empty").rmdir(),
    "folder gone": lambda repo: shutil.rmtree(repo / "a"),
    "one kind for another": swap,
    "outside": lambda repo: (repo.parent / "tmp/brk.lock").mkdir(),
    "outside, a folder gone": lambda repo: shutil.rmtree(repo.parent / "tmp/was"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_undone(tmp_path: Path, change: Callable[[Path], object]) -> None:
    repo = tmp_path / "repo"
    for folder in ("repo/a", "repo/empty", "tmp/was", "tmp/make", "keep"):
        (tmp_path / folder).mkdir(parents=True)
    (repo / "a/one.py").write_text("x = 1\n")
    (repo / "two.py").write_text("")
    (repo / "link").symlink_to("two.py")
    (tmp_path / "keep/file").write_text("kept")
    places = [str(tmp_path / "tmp"), str(tmp_path / "absent"), str(repo)]
    work = Workspace(str(repo), places, keep=str(tmp_path / "tmp/make"))
    before = look(tmp_path)
    for _ in range(2):
        change(repo)
        assert look(tmp_path) != before
        work.put("a/one.py", "x = 3\n") if (repo / "a").is_dir() else None
        work.restore()
        assert look(tmp_path) == before


def test_the_makers_own_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "tmp/make").mkdir(parents=True)
    work = Workspace(str(tmp_path / "repo"), [str(tmp_path / "tmp")], str(tmp_path / "tmp/make"))
    (tmp_path / "tmp/make/results").write_text("{}\n")
    work.restore()
    assert (tmp_path / "tmp/make/results").read_text() == "{}\n"
