"""A seccomp filter that closes the system calls no command of an agent needs.

It is a second wall: namespaces, the unprivileged uid and the dropped capabilities already forbid
most of this. What it adds is a smaller kernel for hostile code to attack (new namespaces, bpf,
io_uring, keyrings, tracing, odd socket families).
"""

import ctypes
import errno
import struct

from sandbox_client.backends.local.jail import kernel

__all__ = ["Program", "build_filter", "is_supported"]

# name: (x86_64, aarch64); None where the architecture has no such call.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_SOCKET = (41, 198)
_SOCKET_FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink
_NAMESPACE_FLAGS = 0x7E020000  # every CLONE_NEW* flag that clone takes

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

_LOAD, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_KILL = 0x80000000
_EPERM = _ERRNO | errno.EPERM
_ENOSYS = _ERRNO | errno.ENOSYS
_NR, _ARCH, _ARG0 = 0, 4, 16

_PR_SET_SECCOMP = 22
_MODE_FILTER = 2


def is_supported(machine: str) -> bool:
    """Whether the filter exists for this architecture, as `os.uname().machine` names it."""
    return machine in _AUDIT_ARCH


def build_filter(machine: str) -> bytes:
    """The filter as an array of `struct sock_filter`."""
    column = list(_AUDIT_ARCH).index(machine)
    denied = {n: _EPERM for numbers in _DENIED.values() if (n := numbers[column]) is not None}
    # glibc falls back to clone, whose flags can be seen; those of clone3 lie behind a pointer.
    denied[_CLONE3[column]] = _ENOSYS
    start = [
        (_LOAD, 0, 0, _ARCH),
        (_JEQ, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR),
    ]
    if machine == "x86_64":
        start += [(_JGE, 0, 1, _X32_BIT), (_RETURN, 0, 0, _ENOSYS)]
    flags = [
        (_JEQ, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, _ARG0),
        (_JSET, 0, 1, _NAMESPACE_FLAGS),
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    families = len(_SOCKET_FAMILIES)
    sockets = [(_JEQ, 0, families + 3, _SOCKET[column]), (_LOAD, 0, 0, _ARG0)]
    sockets += [(_JEQ, families - at, 0, family) for at, family in enumerate(_SOCKET_FAMILIES)]
    sockets += [(_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    code = [*start, *flags, *sockets, *_search(_ranges(denied))]
    return b"".join(struct.pack("=HBBI", *step) for step in code)


def _ranges(denied: dict[int, int]) -> list[tuple[int, int]]:
    """Where stretches of system calls with the same action begin: (first number, action)."""
    ranges = [(0, _ALLOW)]
    for number in sorted(denied):
        if ranges[-1][0] == number:
            ranges.pop()
        if not ranges or ranges[-1][1] != denied[number]:
            ranges.append((number, denied[number]))
        ranges.append((number + 1, _ALLOW))
    return ranges


def _search(ranges: list[tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    """Binary search for a number's range.

    The kernel runs a filter over every system call's number when it is installed; a list of
    comparisons would make that the largest part of a sandbox's start.
    """
    if len(ranges) == 1:
        return [(_RETURN, 0, 0, ranges[0][1])]
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    return [(_JGE, len(below), 0, ranges[middle][0]), *below, *above]


class Program:
    """A filter in memory, ready to be installed any number of times."""

    def __init__(self, filter_: bytes) -> None:
        self._buffer = ctypes.create_string_buffer(filter_, len(filter_))
        self._header = struct.pack("@HP", len(filter_) // 8, ctypes.addressof(self._buffer))
        self._header_buffer = ctypes.create_string_buffer(self._header, len(self._header))

    def install(self) -> None:
        """Binds this process and all its descendants. Needs no_new_privs."""
        address = ctypes.addressof(self._header_buffer)
        kernel.prctl(_PR_SET_SECCOMP, _MODE_FILTER, address)
