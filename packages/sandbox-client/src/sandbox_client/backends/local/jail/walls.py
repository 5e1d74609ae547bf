# ruff: noqa: PTH102, PTH123 -- keeps the fork-server small: no pathlib
"""The walls around a sandbox: namespaces, mounts, limits, another user, a filter of system calls.

They are put up in the sandbox's first process, before it serves any command.
"""

import os
import resource
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sandbox_client.backends.local.jail import kernel, template
from sandbox_client.backends.local.jail.boot import CODE_FOLDER
from sandbox_client.backends.local.jail.messages import Create
from sandbox_client.backends.local.jail.seccomp import Program, build_filter, is_supported

__all__ = ["Settings", "Walls", "may_set_groups"]

_NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWNET


@dataclass(frozen=True)
class Settings:
    """What is the same for every sandbox."""

    uid: int
    gid: int
    """What commands see as theirs."""
    own_uid: int
    own_gid: int
    """What that is outside a sandbox's own user namespace; the same where there is none."""
    rootless: bool
    """The fork-server is root in a user namespace only; each sandbox then has one of its own."""
    python_path: str
    """The real interpreter, as sandboxes see it."""
    mounts: tuple[str, ...]
    """Writable folders beside the work folder."""
    seccomp: bool
    rehearsal_digest: str
    """A stored environment to practise with."""
    rlimits: tuple[tuple[int, int], ...]
    """(resource, limit) pairs, soft and hard alike."""
    spares: int
    """Processes that wait in namespaces of their own for what they are to become."""


class Walls:
    """What a process calls, in this order, to become a sandbox's first one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._may_set_groups = True
        self._filter: Program | None = None

    def prepare(self) -> None:
        """Does beforehand what is the same for all; needs a /proc."""
        machine = os.uname().machine
        if self._settings.seccomp and is_supported(machine):
            self._filter = Program(build_filter(machine))
        self._may_set_groups = may_set_groups()

    def isolate(self) -> None:
        """Gives this process namespaces of its own, with all mounts that sandboxes have alike."""
        kernel.unshare(_NAMESPACES)
        kernel.loopback_up()
        staging, flags = template.STAGING, kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("tmpfs", staging, "tmpfs", flags, "size=64k,nr_inodes=64,mode=700")
        for name in ("upper", "work", *(f"mount{n}" for n in range(len(self._settings.mounts)))):
            os.mkdir(f"{staging}/{name}", 0o755)
            os.chown(f"{staging}/{name}", self._settings.own_uid, self._settings.own_gid)
        for number, target in enumerate(self._settings.mounts):
            kernel.mount(f"{staging}/mount{number}", target, flags=kernel.MS_BIND)
        flags |= kernel.MS_NOEXEC
        kernel.mount("proc", "/proc", "proc", flags)
        # Whatever rights a program gets and mistakes a service makes, the host's settings stay.
        kernel.mount("/proc/sys", "/proc/sys", flags=kernel.MS_BIND)
        flags |= kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY
        kernel.mount("none", "/proc/sys", flags=flags)
        root = kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID
        kernel.mount("none", "/", flags=root)

    def limit(self) -> None:
        """Sets the limits that all sandboxes have."""
        _set_rlimits(self._settings.rlimits)

    def mount(self, asked: Create) -> list[int]:
        """Mounts what this sandbox starts from, on an isolated process's file systems.

        Returns:
            Descriptors of the root, of the overlay's upper layer and, where there are several
            lower layers, of all those together.
        """
        workdir, staging = asked.workdir, template.STAGING
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_REMOUNT
        size = f"size={asked.disk_bytes},nr_inodes={asked.inodes}"
        kernel.mount("tmpfs", staging, "tmpfs", flags, size)
        view = []
        if len(asked.lower) > 1:
            self._mount_overlay(workdir, asked.lower)
            view.append(_open_folder(workdir))
            kernel.umount(workdir)
        self._mount_overlay(workdir, asked.lower, "upper", "work")
        for number, content in asked.mounts.items():
            work = f"work{number}"
            os.mkdir(f"{staging}/{work}", 0o755)
            target = self._settings.mounts[number]
            self._mount_overlay(target, [content], f"mount{number}", work)
        upper_fd = _open_folder(f"{staging}/upper")
        # With all that is mounted below it: the stored trees, the tmpfs by its own path.
        kernel.umount(CODE_FOLDER)
        root_fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return [root_fd, upper_fd, *view]

    def _mount_overlay(
        self, target: str, lower: Sequence[str], upper: str = "", work: str = ""
    ) -> None:
        """Mounts stored layers on a folder, to be written to in `upper` if that is given."""
        layers = ":".join(f"{template.ENVIRONMENTS}/{layer}" for layer in lower)
        data = f"lowerdir={layers},index=off,metacopy=off,redirect_dir=nofollow,xino=off"
        if self._settings.rootless:
            data += ",userxattr"
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        if upper:
            data += f",upperdir={template.STAGING}/{upper},workdir={template.STAGING}/{work}"
        else:
            flags |= kernel.MS_RDONLY
        kernel.mount("overlay", target, "overlay", flags, data)

    def drop_privileges(self, rlimits: Iterable[tuple[int, int]]) -> None:
        """Gives up root's rights for good, and sets the limits that this sandbox alone has."""
        settings = self._settings
        if settings.rootless:
            proc = _guarded_proc()
        if self._may_set_groups:
            os.setgroups([])
        os.setresgid(settings.own_gid, settings.own_gid, settings.own_gid)
        os.setresuid(settings.own_uid, settings.own_uid, settings.own_uid)
        if settings.rootless:
            self._enter_user_namespace(proc)
        # Only now: the number of processes is counted for each user namespace.
        _set_rlimits(rlimits)
        # Commands run as the same user: this keeps them out of the first process's memory.
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        # Changing the uid has cleared it.
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if self._filter is not None:
            self._filter.install()

    def _enter_user_namespace(self, proc: int) -> None:
        """Leaves the one that owns the sandbox's other namespaces, and all rights over them."""
        settings = self._settings
        # Else the process could not write its own maps; no command runs yet.
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        kernel.unshare(kernel.CLONE_NEWUSER)
        kernel.map_one((settings.uid, settings.own_uid), (settings.gid, settings.own_gid), proc)
        os.close(proc)
        kernel.drop_bounding_set()
        kernel.drop_capabilities()


def may_set_groups() -> bool:
    """Whether this user namespace lets its processes give up groups; needs a /proc."""
    try:
        with open("/proc/self/setgroups", encoding="ascii") as file:
            return file.read() == "allow\n"
    except FileNotFoundError:
        return True


def _guarded_proc() -> int:
    """Closes /proc/1 to writing, but for the descriptor that is returned.

    Commands may have the very user to whom it belongs.
    """
    proc = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    kernel.mount("/proc/1", "/proc/1", flags=kernel.MS_BIND)
    kernel.restrict_tree("/proc/1", kernel.MS_RDONLY)
    return proc


def _set_rlimits(rlimits: Iterable[tuple[int, int]]) -> None:
    for kind, limit in rlimits:
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def _open_folder(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
