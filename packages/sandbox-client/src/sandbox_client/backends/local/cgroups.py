"""Cgroups for sandboxes, versions 1 and 2: limits, out-of-memory counts, and cleaning up.

Every sandbox gets `<parent>/<service>/<sandbox>` in each controller used. `<service>` is derived
from the state folder, so a restarted service finds what an earlier one left behind.
"""

import contextlib
import errno
import logging
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["CgroupLimits", "CgroupSetup", "SandboxCgroup", "detect_cgroups"]

logger = logging.getLogger(__name__)

_ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("memory", "pids", "cpu")
_CPU_PERIOD_US = 100_000
# Making and removing cgroups costs more than all else of a sandbox's start, so some are kept.
_MAX_IDLE = 512
_CLEAN_BYTES = 4 * 1024 * 1024
# Not every kernel is built with these.
_OPTIONAL = frozenset(
    {"memory.swap.max", "memory.memsw.limit_in_bytes", "memory.kmem.tcp.limit_in_bytes"}
)


@dataclass(frozen=True)
class CgroupLimits:
    """Limits of one sandbox. `cpus` of 0 sets no quota."""

    memory_bytes: int
    pids: int
    cpus: float = 0.0


@dataclass
class SandboxCgroup:
    """The cgroups of one sandbox, one folder a controller (in version 2 one for all)."""

    version: int
    limits: CgroupLimits
    folders: dict[str, Path]
    joins: list[int] = field(default_factory=list)
    """Open files through which a process moves itself in by writing "0"."""
    oom_fd: int | None = None
    """What counts those killed for memory, where it is kept open: it is read after each command."""
    _oom_seen: int = 0

    def new_oom_kills(self) -> int:
        """How many processes were killed for memory since the last call."""
        total = self.oom_kills()
        new, self._oom_seen = total - self._oom_seen, total
        return new

    def oom_kills(self) -> int:
        """How many processes were ever killed for memory."""
        if self.oom_fd is not None:
            text = os.pread(self.oom_fd, 4096, 0).decode()
        else:
            file = self._oom_file()
            text = _read(file) if file is not None else ""
        for line in text.splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        return 0

    def _oom_file(self) -> Path | None:
        folder = self.folders.get("memory")
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        return folder / name if folder is not None else None

    def keep_open(self) -> None:
        """Opens what is used often; `remove` closes it."""
        for folder in dict.fromkeys(self.folders.values()):
            self.joins.append(os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
        file = self._oom_file()
        if file is not None:
            self.oom_fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)

    def is_clean(self) -> bool:
        """Whether nothing of the last sandbox is left but a little cache."""
        if any(_read(folder / "cgroup.procs") for folder in self.folders.values()):
            return False
        folder = self.folders.get("memory")
        name = "memory.current" if self.version == 2 else "memory.usage_in_bytes"
        return folder is None or int(_read(folder / name) or 0) <= _CLEAN_BYTES

    def remove(self) -> bool:
        """Removes the folders; False if a process was still in one."""
        for fd in (*self.joins, self.oom_fd):
            if fd is not None:
                os.close(fd)
        self.joins, self.oom_fd = [], None
        done = True
        for folder in dict.fromkeys(self.folders.values()):
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                done = False
        return done


@dataclass
class CgroupSetup:
    """Which controllers this host offers to us, and where. Used cgroups are kept for the next."""

    version: int
    bases: dict[str, Path]
    """Folder of the service by controller; empty if cgroups cannot be used."""
    problems: dict[str, str] = field(default_factory=dict)
    """Why a controller cannot be used."""
    _idle: list[SandboxCgroup] = field(default_factory=list)
    _made: int = 0

    def acquire(self, limits: CgroupLimits) -> SandboxCgroup:
        """Cgroups with these limits, for one sandbox at a time."""
        for at, group in enumerate(self._idle):
            if group.limits == limits:
                del self._idle[at]
                return group
        self._made += 1
        wanted = {
            controller: base / f"slot-{self._made}"
            for controller, base in self.bases.items()
            if controller != "cpu" or limits.cpus > 0
        }
        group = SandboxCgroup(self.version, limits, wanted)
        try:
            for folder in dict.fromkeys(wanted.values()):
                folder.mkdir()
            for controller, folder in wanted.items():
                for file, value in _settings(self.version, controller, limits):
                    _write(folder / file, value)
            group.keep_open()
        except OSError:
            group.remove()
            raise
        return group

    def release(self, group: SandboxCgroup) -> bool:
        """Takes the cgroups of an ended sandbox back; False if a process is still in one."""
        group.new_oom_kills()
        if len(self._idle) < _MAX_IDLE and group.is_clean():
            self._idle.append(group)
            return True
        return group.remove()

    def close(self) -> None:
        """Removes everything when the service ends."""
        for group in self._idle:
            group.remove()
        self._idle.clear()
        self.remove_leftovers()
        self.remove_base()

    def remove_leftovers(self) -> int:
        """Ends everything in the service's cgroups; returns how many cgroups there were."""
        found = 0
        for base in dict.fromkeys(self.bases.values()):
            for folder in _children(base):
                found += 1
                _end_all(folder)
        return found

    def remove_base(self) -> None:
        """Removes the service's own folders when it ends."""
        for base in dict.fromkeys(self.bases.values()):
            with contextlib.suppress(OSError):
                base.rmdir()
                base.parent.rmdir()  # fails while another service uses it, rightly


def detect_cgroups(
    parent: str, service: str, *, make: bool = True, root: Path = _ROOT
) -> CgroupSetup:
    """Finds usable controllers below `root` and makes the service's folders in them.

    With `make=False` nothing is left behind; the result then only tells what would work.
    """
    if (root / "cgroup.controllers").exists():
        setup = _detect_v2(root, parent, service)
    else:
        setup = _detect_v1(root, parent, service)
    if not make:
        setup.remove_base()
    return setup


def _detect_v1(root: Path, parent: str, service: str) -> CgroupSetup:
    setup = CgroupSetup(1, {})
    for controller in _CONTROLLERS:
        base = root / controller / parent / service
        if not (root / controller / "cgroup.procs").exists():
            setup.problems[controller] = "the controller is not mounted"
            continue
        try:
            base.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            setup.problems[controller] = f"cannot create {base}: {error.strerror}"
            continue
        setup.bases[controller] = base
    return setup


def _detect_v2(root: Path, parent: str, service: str) -> CgroupSetup:
    setup = CgroupSetup(2, {})
    base = root / parent / service
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return CgroupSetup(
            2, {}, dict.fromkeys(_CONTROLLERS, f"cannot create {base}: {error.strerror}")
        )
    offered = _read(root / "cgroup.controllers").split()
    for controller in _CONTROLLERS:
        if controller not in offered:
            setup.problems[controller] = "version 2 does not offer it (version 1 may hold it)"
            continue
        try:
            # A controller has to be handed down from level to level.
            for level in (root, base.parent, base):
                if controller not in _read(level / "cgroup.subtree_control").split():
                    _write(level / "cgroup.subtree_control", f"+{controller}")
        except OSError as error:
            reason = error.strerror
            if error.errno == errno.EBUSY:
                reason = "processes live in the cgroup root; move them into a cgroup of their own"
            setup.problems[controller] = f"cannot enable it below {level}: {reason}"
            continue
        setup.bases[controller] = base
    return setup


def _settings(version: int, controller: str, limits: CgroupLimits) -> Iterator[tuple[str, str]]:
    quota = str(max(1000, int(limits.cpus * _CPU_PERIOD_US)))
    if controller == "pids":
        yield "pids.max", str(limits.pids)
    elif controller == "memory" and version == 1:
        yield "memory.limit_in_bytes", str(limits.memory_bytes)
        # Without this a sandbox at its limit goes on in the host's swap space.
        yield "memory.memsw.limit_in_bytes", str(limits.memory_bytes)
        # Version 1 counts what waits in network sockets apart, and only where it has a limit.
        yield "memory.kmem.tcp.limit_in_bytes", str(limits.memory_bytes // 4)
    elif controller == "memory":
        yield "memory.max", str(limits.memory_bytes)
        yield "memory.swap.max", "0"
    elif controller == "cpu" and version == 1:
        yield "cpu.cfs_period_us", str(_CPU_PERIOD_US)
        yield "cpu.cfs_quota_us", quota
    elif controller == "cpu":
        yield "cpu.max", f"{quota} {_CPU_PERIOD_US}"


def _children(folder: Path) -> list[Path]:
    try:
        return [child for child in folder.iterdir() if child.is_dir()]
    except FileNotFoundError:
        return []


def _end_all(folder: Path, *, patience_s: float = 5.0) -> None:
    """Kills every process in a cgroup and removes it."""
    end = time.monotonic() + patience_s
    with contextlib.suppress(OSError):
        _write(folder / "cgroup.kill", "1")  # all at once, where version 2 has it
    while True:
        for pid in _read(folder / "cgroup.procs").split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > end:
                logger.warning("cgroup %s of an earlier run cannot be removed", folder)
                return
            time.sleep(0.01)
        else:
            return


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _write(path: Path, text: str) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.name in _OPTIONAL:
            return
        raise
    try:
        os.write(fd, text.encode())
    except OSError as error:
        if path.name not in _OPTIONAL or error.errno != errno.EOPNOTSUPP:
            raise
    finally:
        os.close(fd)
