"""The ends and the number of processes that are not this one's children."""

import errno
import fcntl
import os
import resource
import struct
import subprocess
from pathlib import Path

__all__ = ["ends_are_told", "exit_status", "is_ending", "most_processes"]

# struct pidfd_info of <linux/pidfd.h>: what is known, a cgroup's number, eleven ids, the status.
_INFO = struct.Struct("<QQ11Ii")
_READ_WRITE, _TYPE, _NUMBER = 3, 0xFF, 11
_GET_INFO = _READ_WRITE << 30 | _INFO.size << 16 | _TYPE << 8 | _NUMBER
_EXIT_IS_KNOWN = 1 << 3
_FLAGS_FIELD = 6  # of /proc/<pid>/stat, counted behind the name
_PF_EXITING = 0x4
_UNKNOWN_CALL = (errno.ENOTTY, errno.EINVAL, errno.ESRCH)


def exit_status(pid_fd: int) -> int | None:
    """The status, as of wait(2), of a process that has ended; None until it has been collected.

    Raises:
        NotImplementedError: the kernel (before 6.15) does not tell.
    """
    asked = bytearray(_INFO.pack(_EXIT_IS_KNOWN, *(0,) * 13))
    try:
        fcntl.ioctl(pid_fd, _GET_INFO, asked)
    except OSError as error:
        if error.errno in _UNKNOWN_CALL:
            raise NotImplementedError("the kernel does not tell how processes ended") from error
        raise
    known, *_, status = _INFO.unpack(asked)
    return int(status) if known & _EXIT_IS_KNOWN else None


def ends_are_told() -> bool:
    """Whether this kernel tells by `exit_status` how processes ended that are collected."""
    with subprocess.Popen(["true"]) as process:
        pid_fd = os.pidfd_open(process.pid)
    try:
        return exit_status(pid_fd) == 0
    except NotImplementedError:
        return False
    finally:
        os.close(pid_fd)


def is_ending(pid: int) -> bool:
    """Whether a process is on its way out or gone.

    The first process of a pid namespace is so before it takes any other process with it.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return bool(int(stat.rpartition(")")[2].split()[_FLAGS_FIELD]) & _PF_EXITING)


def most_processes() -> int:
    """As many as one user may have: the kernel's pids, or what this service itself may have.

    Unless it is told, podman sets a limit of its own, which root cannot without CAP_SYS_RESOURCE.
    """
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    pids = int(Path("/proc/sys/kernel/pid_max").read_text())
    return pids if hard == resource.RLIM_INFINITY else min(hard, pids)
