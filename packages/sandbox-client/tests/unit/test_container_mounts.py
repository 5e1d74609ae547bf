"""The writable files of a container, mounted for real. Needs root."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sandbox_client.backends.docker.mounts import (
    Origin,
    SandboxMounts,
    make_mounts,
    remove_mounts,
)
from sandbox_client.backends.local.host import isolation_problems

Make = Callable[..., SandboxMounts]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    problems = isolation_problems()
    if problems:
        pytest.skip(f"nothing can be mounted here: {'; '.join(problems)}")
    lower = tmp_path / "lower"
    lower.mkdir()
    (lower / "file").write_text("old")

    def make(base: str = "base", **options: int) -> SandboxMounts:
        return make_mounts(
            tmp_path / base,
            "sb-1",
            Origin((lower,), ("/tmp", "/logs")),
            disk_bytes=options.get("disk_bytes", 1 << 20),
            inodes=options.get("inodes", 64),
            owner=(65534, 65534),
        )

    yield make
    remove_mounts(tmp_path / "base" / "sb-1")


def mounted(path: Path) -> list[str]:
    return [
        line for line in Path("/proc/self/mounts").read_text().splitlines() if str(path) in line
    ]


def test_a_change_is_in_the_upper_layer_and_the_environment_stays_as_it_was(
    make: Make, tmp_path: Path
) -> None:
    mounts = make()
    (mounts.work / "file").write_text("new")
    assert (mounts.upper / "file").read_text() == "new"
    assert (tmp_path / "lower" / "file").read_text() == "old"
    assert set(mounts.binds) == {"/tmp", "/logs", "/dev/shm"}
    for folder in (mounts.work, *mounts.binds.values()):
        assert (folder.stat().st_uid, folder.stat().st_mode & 0o7777) == (65534, 0o755)
        assert os.statvfs(folder).f_flag & os.ST_NOSUID


def test_all_folders_share_one_limit_of_bytes_and_of_files(make: Make) -> None:
    mounts = make(disk_bytes=256 * 1024)
    mounts.binds["/logs"].joinpath("a").write_bytes(bytes(200 * 1024))
    for folder in (mounts.work, mounts.binds["/tmp"]):
        with pytest.raises(OSError, match="No space left"):
            folder.joinpath("b").write_bytes(bytes(100 * 1024))
    remove_mounts(mounts.folder)
    mounts = make(inodes=32)
    files = (mounts.binds["/tmp"] / str(number) for number in range(40))
    with pytest.raises(OSError, match="No space left"):
        deque((file.write_bytes(b"") for file in files), maxlen=0)


def test_nothing_is_left_also_of_folders_that_are_in_use(make: Make) -> None:
    mounts = make()
    with (mounts.work / "file").open():
        assert len(mounted(mounts.folder)) == 2
        remove_mounts(mounts.folder)
    assert mounted(mounts.folder) == []
    assert not mounts.folder.exists()
    remove_mounts(mounts.folder)  # repeatable


def test_a_place_that_overlays_cannot_name_is_refused_and_leaves_nothing(
    make: Make, tmp_path: Path
) -> None:
    with pytest.raises(OSError, match="state_dir"):
        make("a:b")
    assert not (tmp_path / "a:b").exists()
