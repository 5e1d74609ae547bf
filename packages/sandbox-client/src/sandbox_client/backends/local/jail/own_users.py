# ruff: noqa: PTH102, PTH106 -- runs without any package, before the service does
"""A user namespace for a service that is not root: entering it, and trying what it allows.

Inside, the user's own id is root's. Where the host has given the user subordinate ids, commands get
one of them; else they run under the user's own id, which a namespace of each sandbox shows as
another.
"""

import errno
import os
import subprocess

from sandbox_client.backends.local.jail import kernel

__all__ = ["enter", "try_isolation"]

_CANNOT_START = 2


def enter(argv: list[str], extra: dict[str, tuple[int, int]] | None) -> None:
    """Moves this process, which has one thread, into a new user namespace and executes `argv`.

    Args:
        argv: program with its arguments.
        extra: "uid" and "gid" -> (id inside, the user's subordinate id), if there are any.
    """
    try:
        if extra is None:
            _unshare_as_root(kernel.CLONE_NEWUSER)
        else:
            _enter_with(extra)
    except OSError as error:
        os.write(2, f"error: cannot enter a user namespace: {error.strerror}\n".encode())
        os._exit(_CANNOT_START)
    os.execv(argv[0], argv)  # noqa: S606


def _unshare_as_root(flags: int) -> None:
    """Enters new namespaces as root of the new user namespace."""
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(flags)
    proc = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)
    kernel.map_one((0, uid), (0, gid), proc)
    os.close(proc)


def _enter_with(extra: dict[str, tuple[int, int]]) -> None:
    """Maps subordinate ids too, which takes a privileged program from outside the namespace."""
    own = {"uid": os.geteuid(), "gid": os.getegid()}
    target = os.getpid()
    wait, go = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(go)
        os.read(wait, 1)
        failed = 0
        for kind, (inside, outside) in extra.items():
            ids = (0, own[kind], 1, inside, outside, 1)
            failed |= subprocess.call([f"new{kind}map", str(target), *map(str, ids)])
        os._exit(1 if failed else 0)
    os.close(wait)
    kernel.unshare(kernel.CLONE_NEWUSER)
    os.close(go)
    if os.waitpid(helper, 0)[1]:
        raise OSError(errno.EPERM, "newuidmap or newgidmap has refused; see /etc/subuid")


def try_isolation() -> None:
    """Does in a user namespace what a sandbox needs. Prints what failed, or nothing, and exits."""
    step = "make a user namespace"
    try:
        _unshare_as_root(kernel.CLONE_NEWUSER)
        step = "make the other namespaces"
        kernel.unshare(
            kernel.CLONE_NEWNS
            | kernel.CLONE_NEWPID
            | kernel.CLONE_NEWIPC
            | kernel.CLONE_NEWUTS
            | kernel.CLONE_NEWNET
        )
        kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
        step = "mount a tmpfs"
        kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID)  # noqa: S108
        step = "mount an overlay"
        _try_overlay("/tmp")  # noqa: S108
        step = "mount /proc"
        _try_proc()
    except OSError as error:
        os.write(1, f"cannot {step}: {error.strerror}".encode())
        os._exit(1)
    os._exit(0)


def _try_overlay(folder: str) -> None:
    for name in ("lower", "upper", "work", "top", "lower/folder"):
        os.mkdir(f"{folder}/{name}")
    kernel.mount(
        "overlay",
        f"{folder}/top",
        "overlay",
        data=f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work,userxattr",
    )
    # A folder in the place of a removed one gets a mark, which an older tmpfs cannot hold.
    os.rmdir(f"{folder}/top/folder")
    os.mkdir(f"{folder}/top/folder")
    if os.getxattr(f"{folder}/upper/folder", "user.overlay.opaque") != b"y":
        raise OSError(errno.EOPNOTSUPP, "its tmpfs has no user attributes")


def _try_proc() -> None:
    pid = os.fork()
    if pid == 0:
        try:
            kernel.mount("proc", "/proc", "proc")
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    number = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if number:
        raise OSError(number, os.strerror(number))
