"""The ends of processes that are not this one's children."""

import errno
import fcntl
import struct
from pathlib import Path

__all__ = ["exit_status", "is_ending"]

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


def is_ending(pid: int) -> bool:
    """Whether a process is on its way out or gone.

    The first process of a pid namespace is so before it takes any other process with it.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return bool(int(stat.rpartition(")")[2].split()[_FLAGS_FIELD]) & _PF_EXITING)
