"""Cgroups in a tree of plain files that behaves as the kernel's does, as far as it is used."""

import errno
import os
import signal
import subprocess
from pathlib import Path

import pytest
from sandbox_client.backends.local.cgroups import CgroupLimits, CgroupSetup, detect_cgroups

MIB = 1024 * 1024
LIMITS = CgroupLimits(memory_bytes=64 * MIB, pids=32, cpus=0.5)
V1 = {
    "memory": {
        "memory.limit_in_bytes": "",
        "memory.memsw.limit_in_bytes": "",
        "memory.kmem.tcp.limit_in_bytes": "",
        "memory.usage_in_bytes": "4096",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
    },
    "pids": {"pids.max": "max"},
    "cpu": {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "-1"},
}
V2 = {
    "memory": {
        "memory.max": "max",
        "memory.swap.max": "max",
        "memory.current": "4096",
        "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n",
    },
    "pids": {"pids.max": "max"},
    "cpu": {"cpu.max": "max 100000"},
}


class Tree:
    """What the kernel does by itself: a new folder has its files, which vanish with it, and what
    is written to a file is what it says from then on."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.lacking: set[str] = set()
        self._rmdir = Path.rmdir
        mkdir = Path.mkdir

        def made(folder: Path, *args: int, **options: bool) -> None:
            above = folder.parent
            if options.get("parents") and not above.exists():
                made(above, **options)
            if folder.exists() and options.get("exist_ok"):
                return
            mkdir(folder)
            self.fill(folder)

        def removed(folder: Path) -> None:
            if (folder / "cgroup.procs").read_text():
                raise OSError(errno.EBUSY, "Device or resource busy")
            for file in folder.iterdir():
                if file.is_file():
                    file.unlink()
            self._rmdir(folder)

        write = os.write

        def written(fd: int, data: bytes) -> int:
            file = Path(f"/proc/self/fd/{fd}").readlink()
            if file.is_relative_to(root):
                self.refuse(data)
                kept = file.read_text() if data.startswith(b"+") else ""
                file.write_text(f"{kept} {data.decode().lstrip('+')}".strip())
                return len(data)
            return write(fd, data)

        monkeypatch.setattr(os, "write", written)
        monkeypatch.setattr(Path, "mkdir", made)
        monkeypatch.setattr(Path, "rmdir", removed)

    def fill(self, folder: Path) -> None:
        raise NotImplementedError

    def refuse(self, data: bytes) -> None:
        """Raises what the kernel would."""

    def write(self, folder: Path, files: dict[str, str]) -> None:
        for name, text in files.items():
            if name not in self.lacking:
                (folder / name).write_text(text)


class Version1(Tree):
    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(root, monkeypatch)
        for controller in V1:
            (root / controller).mkdir()

    def fill(self, folder: Path) -> None:
        controller = folder.relative_to(self.root).parts[0]
        self.write(folder, {"cgroup.procs": "", **V1[controller]})


class Version2(Tree):
    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, offered: str) -> None:
        super().__init__(root, monkeypatch)
        self.write(root, {"cgroup.controllers": offered, "cgroup.subtree_control": ""})

    def fill(self, folder: Path) -> None:
        # Only what is handed down from above has its files here.
        handed = (folder.parent / "cgroup.subtree_control").read_text().split()
        self.write(folder, {"cgroup.procs": "", "cgroup.subtree_control": "", "cgroup.kill": ""})
        for controller in handed:
            self.write(folder, V2[controller])


def contents(folder: Path, *names: str) -> list[str]:
    return [(folder / name).read_text() for name in names]


def test_version_1_gets_every_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Version1(tmp_path, monkeypatch)
    setup = detect_cgroups("tailrace", "service", root=tmp_path)
    assert (setup.version, setup.problems) == (1, {})
    group = setup.acquire(LIMITS)
    assert len(group.joins) == 3
    memory, pids, cpu = (group.folders[name] for name in ("memory", "pids", "cpu"))
    # Swap space counts, and what waits in sockets: else both would be without a limit.
    assert contents(
        memory,
        "memory.limit_in_bytes",
        "memory.memsw.limit_in_bytes",
        "memory.kmem.tcp.limit_in_bytes",
    ) == [str(64 * MIB), str(64 * MIB), str(16 * MIB)]
    assert contents(pids, "pids.max") == ["32"]
    assert contents(cpu, "cpu.cfs_period_us", "cpu.cfs_quota_us") == ["100000", "50000"]


def test_version_2_gets_every_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Version2(tmp_path, monkeypatch, "cpuset cpu io memory pids")
    setup = detect_cgroups("tailrace", "service", root=tmp_path)
    assert (setup.version, setup.problems) == (2, {})
    group = setup.acquire(LIMITS)
    # One folder for all, joined once.
    assert len(set(group.folders.values())) == 1
    assert len(group.joins) == 1
    folder = group.folders["memory"]
    assert contents(folder, "memory.max", "memory.swap.max", "pids.max", "cpu.max") == [
        str(64 * MIB),
        "0",
        "32",
        "50000 100000",
    ]


def test_a_host_without_swap_accounting_has_the_other_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Version2(tmp_path, monkeypatch, "memory pids cpu")
    tree.lacking = {"memory.swap.max"}
    group = detect_cgroups("tailrace", "service", root=tmp_path).acquire(LIMITS)
    assert contents(group.folders["memory"], "memory.max") == [str(64 * MIB)]


def test_a_controller_that_version_2_lacks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Version2(tmp_path, monkeypatch, "hugetlb pids")
    setup = detect_cgroups("tailrace", "service", root=tmp_path)
    assert set(setup.bases) == {"pids"}
    assert set(setup.problems) == {"memory", "cpu"}
    assert "version 1 may hold it" in setup.problems["memory"]


def test_a_root_full_of_processes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Version2(tmp_path, monkeypatch, "memory pids cpu")

    def refuse(data: bytes) -> None:
        if data.startswith(b"+"):
            raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(tree, "refuse", refuse)
    setup = detect_cgroups("tailrace", "service", root=tmp_path)
    assert setup.bases == {}
    assert "processes live in the cgroup root" in setup.problems["pids"]


@pytest.mark.parametrize("version", [1, 2])
def test_out_of_memory_is_counted_since_the_last_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    setup = _detected(tmp_path, monkeypatch, version)
    group = setup.acquire(LIMITS)
    file = group.folders["memory"] / ("memory.oom_control" if version == 1 else "memory.events")
    assert group.new_oom_kills() == 0
    file.write_text(file.read_text().replace("oom_kill 0", "oom_kill 3"))
    assert group.new_oom_kills() == 3
    assert group.new_oom_kills() == 0


@pytest.mark.parametrize("version", [1, 2])
def test_a_clean_cgroup_is_used_again_and_a_dirty_one_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    setup = _detected(tmp_path, monkeypatch, version)
    group = setup.acquire(LIMITS)
    assert setup.release(group)
    assert setup.acquire(LIMITS) is group
    usage = "memory.usage_in_bytes" if version == 1 else "memory.current"
    (group.folders["memory"] / usage).write_text(str(50 * MIB))
    assert setup.release(group)
    assert not group.folders["memory"].exists()
    other = setup.acquire(LIMITS)
    (other.folders["pids"] / "cgroup.procs").write_text("1234\n")
    assert not setup.release(other)


@pytest.mark.parametrize("version", [1, 2])
def test_leftovers_are_killed_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    group = _detected(tmp_path, monkeypatch, version).acquire(LIMITS)
    killed = []
    really_kill = os.kill
    survivor = subprocess.Popen(["sleep", "60"])
    for folder in set(group.folders.values()):
        (folder / "cgroup.procs").write_text(f"{survivor.pid}\n")

    def kill(pid: int, number: int) -> None:
        killed.append((pid, number))
        really_kill(pid, number)
        for folder in set(group.folders.values()):
            if folder.exists():
                (folder / "cgroup.procs").write_text("")

    monkeypatch.setattr(os, "kill", kill)
    successor = detect_cgroups("tailrace", "service", root=tmp_path)
    assert successor.remove_leftovers() == len(set(group.folders.values()))
    assert set(killed) == {(survivor.pid, signal.SIGKILL)}
    survivor.wait()
    assert not any(folder.exists() for folder in group.folders.values())
    successor.remove_base()
    assert not any(base.exists() for base in successor.bases.values())


def _detected(root: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> CgroupSetup:
    if version == 1:
        Version1(root, monkeypatch)
    else:
        Version2(root, monkeypatch, "memory pids cpu")
    return detect_cgroups("tailrace", "service", root=root)
