"""The Linux calls that Python 3.11 does not offer, over ctypes. Errors are `OSError`."""

import ctypes
import os
import sys

__all__ = [
    "CLONE_NEWIPC",
    "CLONE_NEWNET",
    "CLONE_NEWNS",
    "CLONE_NEWPID",
    "CLONE_NEWUTS",
    "MS_BIND",
    "MS_NODEV",
    "MS_NOEXEC",
    "MS_NOSUID",
    "MS_PRIVATE",
    "MS_RDONLY",
    "MS_REC",
    "MS_REMOUNT",
    "call",
    "clear_inheritable_capabilities",
    "drop_bounding_set",
    "fork",
    "fs_identity",
    "loopback_up",
    "mount",
    "openat2",
    "pivot_root",
    "prctl",
    "set_hostname",
    "setns",
    "umount",
    "unshare",
]

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
_MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38

RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10

_CAPABILITY_VERSION_3 = 0x20080522
_AF_INET, _SOCK_DGRAM = 2, 2
_SIOCSIFFLAGS = 0x8914
# struct ifreq: sixteen bytes of name, then the flags, of which IFF_UP is one.
_LOOPBACK_UP = b"lo".ljust(16, b"\0") + (1).to_bytes(2, sys.byteorder) + bytes(22)
# openat2 has one number on every architecture; pivot_root does not.
_SYS_OPENAT2 = 437
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)
# Keeps the interpreter's lock, which the child then holds as well.
_forking = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.mount.argtypes = (
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
)
_libc.prctl.argtypes = (ctypes.c_int,) + (ctypes.c_ulong,) * 4


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def call(number: int, *arguments: object, what: str) -> int:
    """Makes a raw system call."""
    return _check(_libc.syscall(ctypes.c_long(number), *arguments), what)


def fork() -> int:
    """Forks as C programs do.

    `os.fork` also repairs what other threads may have left half done, at about four times the cost.
    A process that has only ever had one thread needs none of it, except for what modules ask to be
    told; see `stash`.
    """
    return _check(_forking.fork(), "fork")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Mounts a file system; the error names the target."""
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None
    )
    _check(result, f"mount {kind or source} on {target}")


def umount(target: str) -> None:
    """Takes a mount out of this namespace at once; what uses it goes on using it."""
    _check(_libc.umount2(target.encode(), _MNT_DETACH), f"unmount {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    """Makes another mount the root of this mount namespace."""
    number = _SYS_PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(f"pivot_root: architecture {os.uname().machine} is not known")
    call(number, new_root.encode(), put_old.encode(), what="pivot_root")


def unshare(flags: int) -> None:
    """Leaves namespaces for new ones."""
    _check(_libc.unshare(flags), f"unshare {flags:#x}")


def setns(fd: int, kind: int = 0) -> None:
    """Joins a namespace."""
    _check(_libc.setns(fd, kind), "setns")


def prctl(option: int, value: int = 0, second: int = 0) -> None:
    """Sets a property of this process."""
    _check(_libc.prctl(option, value, second, 0, 0), f"prctl {option}")


def set_hostname(name: str) -> None:
    """Sets the host name of the current uts namespace."""
    raw = name.encode()
    _check(_libc.sethostname(raw, len(raw)), "sethostname")


def drop_bounding_set() -> None:
    """Takes every capability out of what a later exec could regain."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            return  # the first number that this kernel does not know


def clear_inheritable_capabilities() -> None:
    """Empties the inheritable set; permitted and effective ones vanish with the root uid."""

    class Header(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]

    class Data(ctypes.Structure):
        _fields_ = [
            ("effective", ctypes.c_uint32),
            ("permitted", ctypes.c_uint32),
            ("inheritable", ctypes.c_uint32),
        ]

    header = Header(_CAPABILITY_VERSION_3, 0)
    data = (Data * 2)()
    _check(_libc.capget(ctypes.byref(header), ctypes.byref(data)), "capget")
    for word in data:
        word.inheritable = 0
    _check(_libc.capset(ctypes.byref(header), ctypes.byref(data)), "capset")


def loopback_up() -> None:
    """Switches the loopback on in the current network namespace."""
    fd = _check(_libc.socket(_AF_INET, _SOCK_DGRAM, 0), "socket")
    try:
        _check(_libc.ioctl(fd, _SIOCSIFFLAGS, _LOOPBACK_UP), "switch the loopback on")
    finally:
        os.close(fd)


class _OpenHow(ctypes.Structure):
    _fields_ = [
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    ]


def openat2(directory_fd: int, path: str, flags: int, *, mode: int = 0, resolve: int = 0) -> int:
    """Opens a file while the kernel keeps the walk inside the directory."""
    how = _OpenHow(flags | os.O_CLOEXEC, mode, resolve)
    return call(
        _SYS_OPENAT2,
        directory_fd,
        os.fsencode(path),
        ctypes.byref(how),
        ctypes.sizeof(how),
        what=path,
    )


def fs_identity(uid: int, gid: int) -> None:
    """Makes this thread's file accesses those of another user; root's return with 0 and 0."""
    if uid == 0:
        _libc.setfsuid(0)
        _libc.setfsgid(0)
    else:
        _libc.setfsgid(gid)
        _libc.setfsuid(uid)
    # Both calls report the previous id, never an error; asking with -1 shows the present one.
    if _libc.setfsuid(-1) != uid or _libc.setfsgid(-1) != gid:
        raise PermissionError(f"cannot take file-system identity {uid}:{gid}")
