"""A container's cgroups as this host sees them: one below them for each command.

A process cannot leave its cgroup from inside a container, whatever it forks and whichever session
it opens. So a command's cgroup holds all that it has started, what it leaves behind included.
"""

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from sandbox_client.backends.local.cgroups import CgroupLimits, SandboxCgroup

__all__ = ["CommandCgroup", "ContainerCgroups", "find_cgroups"]

_ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("freezer", "cpuacct", "memory", "pids")
_NS = 1e-9
_US = 1e-6
# The kernel freezes a few processes at once; who cannot be frozen is in a call, and forks nothing.
_FREEZE_S = 0.05
# A runtime starts a command with a few threads of its own, which then go away.
_STARTING_PIDS = 12
_PROC = Path("/proc")


@dataclass
class ContainerCgroups:
    """Where a container's processes are, by controller; in version 2 in one place for all."""

    version: int
    tracking: Path
    """Commands get a cgroup of their own below it, to be killed as a whole."""
    accounting: Path | None
    """The same for their processor time; None where it cannot be counted."""
    memory: SandboxCgroup
    pids: Path | None
    _made: int = field(default=0)

    def exhausted(self, oom_kills_before: int) -> str:
        """Which of its limits keeps the container from starting anything; empty if none does."""
        if self.memory.oom_kills() > oom_kills_before:
            return "memory"
        if self.pids is None:
            return ""
        now, most = (
            (self.pids / f"pids.{name}").read_text().strip() for name in ("current", "max")
        )
        return "pids" if most != "max" and int(most) - int(now) < _STARTING_PIDS else ""

    def command(self) -> "CommandCgroup":
        """Makes the cgroup of a new command.

        Raises:
            OSError: the container is gone.
        """
        self._made += 1
        name = f"command-{self._made}"
        folders = {"tracking": self.tracking / name}
        if self.accounting is not None:
            folders["accounting"] = self.accounting / name
        for folder in dict.fromkeys(folders.values()):
            folder.mkdir()
        return CommandCgroup(self.version, folders["tracking"], folders.get("accounting"))


@dataclass(frozen=True)
class CommandCgroup:
    """All processes of one command."""

    version: int
    tracking: Path
    accounting: Path | None

    def add(self, pid: int) -> None:
        """Puts a process in; its children will be born there."""
        for folder in {self.tracking, self.accounting or self.tracking}:
            (folder / "cgroup.procs").write_text(str(pid))

    def kill(self) -> None:
        """Kills every process in it, also those that fork meanwhile."""
        if self.version == 2 and (self.tracking / "cgroup.kill").exists():
            with contextlib.suppress(OSError):  # the container is gone
                (self.tracking / "cgroup.kill").write_text("1")
            return
        # A frozen process cannot fork while others are being killed.
        self._freeze(frozen=True)
        for pid in _pids(self.tracking):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._freeze(frozen=False)

    def cpu_s(self) -> float:
        """Processor time of all processes that were ever in it."""
        if self.accounting is None:
            return 0.0
        try:
            if self.version == 1:
                return int((self.accounting / "cpuacct.usage").read_text()) * _NS
            lines = (self.accounting / "cpu.stat").read_text().splitlines()
        except FileNotFoundError:
            return 0.0  # the container is gone
        found = dict(line.split(" ", 1) for line in lines)
        return int(found["usage_usec"]) * _US

    def remove(self) -> bool:
        """Removes it; False if a process is still in it."""
        try:
            for folder in {self.tracking, self.accounting or self.tracking}:
                with contextlib.suppress(FileNotFoundError):
                    folder.rmdir()
        except OSError:
            return False
        return True

    def _freeze(self, *, frozen: bool) -> None:
        if self.version == 2:
            file, texts, seen = "cgroup.freeze", ("0", "1"), "frozen 1"
        else:
            file, texts, seen = "freezer.state", ("THAWED", "FROZEN"), "FROZEN"
        state = self.tracking / ("cgroup.events" if self.version == 2 else file)
        with contextlib.suppress(FileNotFoundError):  # the container is gone
            (self.tracking / file).write_text(texts[frozen])
            end = time.monotonic() + _FREEZE_S
            while frozen and seen not in state.read_text() and time.monotonic() < end:
                time.sleep(0.001)


def find_cgroups(pid: int, root: Path = _ROOT, proc: Path = _PROC) -> ContainerCgroups:
    """The cgroups of a container, by the pid of its first process.

    Raises:
        OSError: it is gone, or its cgroups cannot be used from here.
    """
    version = 2 if (root / "cgroup.controllers").exists() else 1
    places: dict[str, Path] = {}
    for line in (proc / str(pid) / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if version == 2 and not controllers:
            places = dict.fromkeys(
                ("freezer", "cpuacct", "memory", "pids"), root / path.lstrip("/")
            )
        elif version == 1:
            for controller in controllers.split(","):
                places[controller] = root / controller / path.lstrip("/")
    tracking = places.get("freezer")
    if tracking is None or not tracking.is_dir():
        raise OSError(
            f"the container's freezer cgroup cannot be seen ({tracking}); the service has to run "
            "in the daemon's cgroup namespace, with /sys/fs/cgroup mounted"
        )
    accounting = places.get("cpuacct")
    memory = {"memory": places["memory"]} if "memory" in places else {}
    return ContainerCgroups(
        version,
        tracking,
        accounting,
        SandboxCgroup(version, CgroupLimits(0, 0), memory),
        places.get("pids"),
    )


def _pids(folder: Path) -> list[int]:
    try:
        return [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
    except FileNotFoundError:
        return []
