"""A container's cgroups, on folders that look like the kernel's."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest
from sandbox_client.backends.docker.cgroups import ContainerCgroups, find_cgroups
from sandbox_client.backends.local.cgroups import CgroupLimits, SandboxCgroup

V1 = """\
9:name=systemd:/docker/abc
8:pids:/docker/abc
6:freezer:/docker/abc
4:memory:/docker/abc
1:cpu,cpuacct:/docker/abc
0::/docker/abc
"""
NONE = CgroupLimits(0, 0)
V2 = "0::/system.slice/docker-abc.scope\n"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "cgroup").mkdir()
    return tmp_path


def find(host: Path, listing: str) -> ContainerCgroups:
    (host / "proc" / "7" / "cgroup").write_text(listing)
    return find_cgroups(7, host / "cgroup", host / "proc")


def v1(host: Path) -> ContainerCgroups:
    for controller in ("pids", "freezer", "memory", "cpuacct"):
        (host / "cgroup" / controller / "docker" / "abc").mkdir(parents=True)
    return find(host, V1)


def v2(host: Path) -> ContainerCgroups:
    (host / "cgroup" / "system.slice" / "docker-abc.scope").mkdir(parents=True)
    (host / "cgroup" / "cgroup.controllers").write_text("memory pids")
    return find(host, V2)


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_version_1_keeps_processes_and_times_in_places_of_their_own(host: Path) -> None:
    found = v1(host)
    command = found.command()
    assert command.tracking == host / "cgroup/freezer/docker/abc/command-1"
    assert command.accounting == host / "cgroup/cpuacct/docker/abc/command-1"
    assert found.command().tracking.name == "command-2"
    command.add(99)
    for folder in (command.tracking, command.accounting):
        assert (folder / "cgroup.procs").read_text() == "99"
    (command.accounting / "cpuacct.usage").write_text("1500000000\n")
    assert command.cpu_s() == pytest.approx(1.5)


def test_version_2_has_one_place_for_all(host: Path) -> None:
    command = v2(host).command()
    assert command.tracking == host / "cgroup/system.slice/docker-abc.scope/command-1"
    (command.tracking / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\nsystem_usec 2\n")
    assert command.cpu_s() == pytest.approx(2.5)


def test_a_cgroup_that_cannot_be_seen_is_told(host: Path) -> None:
    with pytest.raises(OSError, match="cgroup namespace"):
        find(host, V1)


def test_version_1_freezes_kills_and_thaws(host: Path, victim: subprocess.Popen[bytes]) -> None:
    command = v1(host).command()
    (command.tracking / "freezer.state").write_text("THAWED")
    (command.tracking / "cgroup.procs").write_text(f"{victim.pid}\n4194300\n")  # one has ended
    command.kill()
    assert victim.wait(timeout=10) == -9
    assert (command.tracking / "freezer.state").read_text() == "THAWED"


def test_version_2_has_the_kernel_kill(host: Path, victim: subprocess.Popen[bytes]) -> None:
    command = v2(host).command()
    (command.tracking / "cgroup.kill").write_text("")
    (command.tracking / "cgroup.procs").write_text(f"{victim.pid}\n")
    command.kill()
    assert (command.tracking / "cgroup.kill").read_text() == "1"
    assert victim.poll() is None  # nobody else did


def test_version_2_of_older_kernels_freezes_first(
    host: Path, victim: subprocess.Popen[bytes]
) -> None:
    command = v2(host).command()
    (command.tracking / "cgroup.freeze").write_text("0")
    (command.tracking / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    (command.tracking / "cgroup.procs").write_text(f"{victim.pid}\n")
    command.kill()
    assert victim.wait(timeout=10) == -9
    assert (command.tracking / "cgroup.freeze").read_text() == "0"


def kernels_own() -> tuple[Path, int] | None:
    """A cgroup file system that can be written to, of version 2 if there is one."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2" and os.access(place, os.W_OK):
            return Path(place), 2
    freezer = Path("/sys/fs/cgroup/freezer")
    return (freezer.parent, 1) if os.access(freezer, os.W_OK) else None


def test_the_kernel_does_as_the_folders_say() -> None:
    found = kernels_own()
    if found is None:
        pytest.skip("no cgroup file system can be written to here")
    root, version = found
    place = root / ("" if version == 2 else "freezer") / f"tailrace-test-{os.getpid()}"
    place.mkdir()
    process = subprocess.Popen(["sh", "-c", "read go; setsid sleep 60 & wait"], stdin=PIPE)
    try:
        command = ContainerCgroups(
            version, place, place if version == 2 else None, SandboxCgroup(version, NONE, {}), None
        ).command()
        command.add(process.pid)
        assert process.stdin is not None
        process.stdin.close()  # from now on it forks
        if version == 2:
            assert command.cpu_s() >= 0.0
        assert not command.remove()  # it is in use
        command.kill()
        assert process.wait(timeout=20) == -9
        for _ in range(1000):
            if command.remove():
                break
            time.sleep(0.01)
        assert not command.tracking.exists()
    finally:
        process.kill()
        process.wait()
        place.rmdir()


def test_a_container_that_is_gone_is_no_error(host: Path) -> None:
    for found in (v1(host), v2(host)):
        command = found.command()
        assert command.remove()
        command.kill()
        assert command.cpu_s() == 0.0
        assert command.remove()


def test_a_container_tells_which_limit_keeps_it_from_starting_anything(host: Path) -> None:
    found = v1(host)
    pids = host / "cgroup/pids/docker/abc"
    (pids / "pids.max").write_text("131\n")
    (pids / "pids.current").write_text("50\n")
    assert found.exhausted(0) == ""
    (pids / "pids.current").write_text("130\n")
    assert found.exhausted(0) == "pids"
    (pids / "pids.max").write_text("max\n")
    assert found.exhausted(0) == ""
    (host / "cgroup/memory/docker/abc/memory.oom_control").write_text("under_oom 0\noom_kill 1\n")
    assert found.exhausted(0) == "memory"
    assert found.exhausted(1) == ""  # that one was another command's
