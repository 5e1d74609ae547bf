"""The Linux calls that Python 3.11 does not offer, over ctypes. Errors are `OSError`."""

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = [
    "CLONE_NEWIPC",
    "CLONE_NEWNET",
    "CLONE_NEWNS",
    "CLONE_NEWPID",
    "CLONE_NEWUSER",
    "CLONE_NEWUTS",
    "MS_BIND",
    "MS_NODEV",
    "MS_NOEXEC",
    "MS_NOSUID",
    "MS_PRIVATE",
    "MS_RDONLY",
    "MS_REC",
    "MS_REMOUNT",
    "Capabilities",
    "call",
    "change_capabilities",
    "clear_inheritable_capabilities",
    "drop_bounding_set",
    "drop_capabilities",
    "fork",
    "leave_identity",
    "loopback_up",
    "map_one",
    "mount",
    "openat2",
    "pivot_root",
    "prctl",
    "restrict_tree",
    "set_hostname",
    "setns",
    "take_identity",
    "umount",
    "unshare",
]

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
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
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000

PR_SET_PDEATHSIG = 1
_PR_GET_PDEATHSIG = 2
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
# The newer calls have one number on every architecture; the older ones do not.
_SYS_OPENAT2 = 437
_SYS_MOUNT_SETATTR = 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_SET_IDS = {
    "setgroups": {"x86_64": 116, "aarch64": 159},
    "setresgid": {"x86_64": 119, "aarch64": 149},
    "setresuid": {"x86_64": 117, "aarch64": 147},
}
_MACHINE = os.uname().machine

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


def restrict_tree(target: str, flags: int) -> None:
    """Sets MS_RDONLY, MS_NOSUID, MS_NODEV or MS_NOEXEC on a mount and on all below it."""
    # struct mount_attr: what to set, what to clear, propagation, user namespace.
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    where = (_AT_FDCWD, target.encode(), _AT_RECURSIVE)
    call(_SYS_MOUNT_SETATTR, *where, ctypes.byref(attributes), size, what=f"restrict {target}")


def umount(target: str) -> None:
    """Takes a mount out of this namespace at once; what uses it goes on using it."""
    _check(_libc.umount2(target.encode(), _MNT_DETACH), f"unmount {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    """Makes another mount the root of this mount namespace."""
    number = _SYS_PIVOT_ROOT.get(_MACHINE)
    if number is None:
        raise OSError(f"pivot_root: architecture {_MACHINE} is not known")
    call(number, new_root.encode(), put_old.encode(), what="pivot_root")


def unshare(flags: int) -> None:
    """Leaves namespaces for new ones."""
    _check(_libc.unshare(flags), f"unshare {flags:#x}")


def map_one(uid: tuple[int, int], gid: tuple[int, int], proc: int) -> None:
    """Maps (id inside, id outside) in this process's new user namespace.

    `proc` is a descriptor of its folder in /proc.
    """
    for file, text in (
        # Else a user could give up a group that keeps it from something.
        ("setgroups", "deny"),
        ("uid_map", f"{uid[0]} {uid[1]} 1"),
        ("gid_map", f"{gid[0]} {gid[1]} 1"),
    ):
        with open(os.open(file, os.O_WRONLY, dir_fd=proc), "w", encoding="ascii") as out:  # noqa: PTH123
            out.write(text)


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


class _CapabilityHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class Capabilities(ctypes.Structure):
    """One word of a thread's capability sets."""

    _fields_ = [
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    ]


def change_capabilities(change: Callable[[Capabilities], None]) -> None:
    """Applies a change to both words of this thread's capabilities."""
    header = _CapabilityHeader(_CAPABILITY_VERSION_3, 0)
    words = (Capabilities * 2)()
    _check(_libc.capget(ctypes.byref(header), ctypes.byref(words)), "capget")
    for word in words:
        change(word)
    _check(_libc.capset(ctypes.byref(header), ctypes.byref(words)), "capset")


def clear_inheritable_capabilities() -> None:
    """Empties the inheritable set; permitted and effective ones vanish with the root uid."""

    def change(word: Capabilities) -> None:
        word.inheritable = 0

    change_capabilities(change)


def drop_capabilities() -> None:
    """Gives up every capability, for where no change of the uid takes them away."""

    def change(word: Capabilities) -> None:
        word.effective = word.permitted = word.inheritable = 0

    change_capabilities(change)


def _use_capabilities(*, use: bool) -> None:
    """Lays down the thread's capabilities, or takes them up again."""

    def change(word: Capabilities) -> None:
        word.effective = word.permitted if use else 0

    change_capabilities(change)


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


class Tie(NamedTuple):
    """The signal that this thread gets when its process's parent dies, 0 for none; the parent."""

    signal: int
    parent: int


def take_identity(uid: int, gid: int) -> Tie:
    """Makes this thread, and no other, act as another user without groups and capabilities.

    Not only for file accesses: what /proc shows and allows depends on the effective ids too.
    With uid 0 the ids stay, and only the capabilities go. Returns what `leave_identity` needs.
    """
    number = ctypes.c_int()
    prctl(_PR_GET_PDEATHSIG, ctypes.addressof(number))
    tie = Tie(number.value, os.getppid())
    if uid:
        _set_ids("setgroups", 0, None)
        _set_ids("setresgid", -1, gid, -1)
        _set_ids("setresuid", -1, uid, -1)
    else:
        _use_capabilities(use=False)
    return tie


def leave_identity(uid: int, groups: Sequence[int], tie: Tie) -> None:
    """Undoes `take_identity` of this uid; `groups` are the process's supplementary ones."""
    if uid:
        _set_ids("setresuid", -1, 0, -1)
        _set_ids("setresgid", -1, 0, -1)
        _set_ids("setgroups", len(groups), (ctypes.c_uint32 * len(groups))(*groups))
        if tie.signal:
            # With the ids the kernel forgets it: the process would outlive its parent from now on.
            prctl(PR_SET_PDEATHSIG, tie.signal)
            if os.getppid() != tie.parent:  # it died meanwhile
                os.kill(os.getpid(), tie.signal)
    else:
        _use_capabilities(use=True)


def _set_ids(name: str, *arguments: object) -> None:
    """Calls the kernel directly: libc would change every thread of the process."""
    call(_SYS_SET_IDS[name][_MACHINE], *arguments, what=name)
