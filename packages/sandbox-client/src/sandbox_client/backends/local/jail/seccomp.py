"""A seccomp filter that closes the system calls no command of an agent needs.

It is a second wall: namespaces, the unprivileged uid and the dropped capabilities already forbid
most of this. What it adds is a smaller kernel for hostile code to attack (new namespaces, bpf,
io_uring, keyrings, tracing, odd socket families), and peace for the sandbox's first process, whose
limits and priority a command of the same user could change.

The list holds what Docker's default profile refuses a container without capabilities, and more:
tracing and file handles. Calls that are newer than the list do not exist inside.
"""

import ctypes
import errno
import struct

from sandbox_client.backends.local.jail import kernel

__all__ = ["Program", "build_filter", "is_supported"]

# name: (x86_64, aarch64); None where the architecture has no such call.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    "_sysctl": (156, None),
    "acct": (163, 89),
    "add_key": (248, 217),
    "afs_syscall": (183, None),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_settime": (227, 112),
    "create_module": (174, None),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "get_kernel_syms": (177, None),
    "get_mempolicy": (239, 236),
    "getpmsg": (181, None),
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
    "lsm_get_self_attr": (459, 459),
    "lsm_list_modules": (461, 461),
    "lsm_set_self_attr": (460, 460),
    "mbind": (237, 235),
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "putpmsg": (182, None),
    "query_module": (178, None),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "security": (185, None),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "sysfs": (139, None),
    "syslog": (103, 116),
    "tuxcall": (184, None),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "ustat": (136, None),
    "vhangup": (153, 58),
    "vserver": (236, None),
}
_NEWEST_KNOWN = 466
"""The highest number, on both architectures, that the list was made with."""
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_PERSONALITY = (135, 92)
_SOCKET = (41, 198)
_SOCKETPAIR = (53, 199)
_SETPRIORITY = (141, 140)
# prlimit64, sched_setaffinity, sched_setattr, sched_setparam, sched_setscheduler: the first
# argument is the process that they change.
_CHANGE_A_PROCESS = ((302, 261), (203, 122), (314, 274), (142, 118), (144, 119))
_NAMESPACE_FLAGS = 0x7E020000  # every CLONE_NEW* flag that clone takes
_PERSONALITIES = (0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)  # Linux of either width; asking
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_INTERNET_PROTOCOLS = (0, 1, 6, 17, 58)  # any, icmp, tcp, udp, icmp6
_FIRST_PROCESS = 1
_PRIO_USER = 2

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_LOAD, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_KILL = 0x80000000
_EPERM = _ERRNO | errno.EPERM
_ENOSYS = _ERRNO | errno.ENOSYS
_NO_FAMILY = _ERRNO | errno.EAFNOSUPPORT
_NO_PROTOCOL = _ERRNO | errno.EPROTONOSUPPORT
_NR, _ARCH, _ARG0, _ARG1, _ARG2 = 0, 4, 16, 24, 32

_Step = tuple[int, int, int, int]
"""One `struct sock_filter`: operation, steps to skip if it holds, if not, operand."""
_Action = tuple[_Step, ...]
"""What to do about a system call: steps of which the last one that is reached returns."""

_PR_SET_SECCOMP = 22
_MODE_FILTER = 2


def is_supported(machine: str) -> bool:
    """Whether the filter exists for this architecture, as `os.uname().machine` names it."""
    return machine in _AUDIT_ARCH


def build_filter(machine: str) -> bytes:
    """The filter as an array of `struct sock_filter`."""
    column = list(_AUDIT_ARCH).index(machine)
    refused = _returns(_EPERM)
    actions = {n: refused for numbers in _DENIED.values() if (n := numbers[column]) is not None}
    # glibc falls back to clone, whose flags can be seen; those of clone3 lie behind a pointer.
    actions[_CLONE3[column]] = _returns(_ENOSYS)
    flags = ((_JSET, 0, 1, _NAMESPACE_FLAGS), *_returns(_EPERM), *_returns(_ALLOW))
    actions[_CLONE[column]] = ((_LOAD, 0, 0, _ARG0), *flags)
    actions[_PERSONALITY[column]] = _one_of(_ARG0, _PERSONALITIES, _EPERM)
    actions[_SOCKETPAIR[column]] = _one_of(_ARG0, (_UNIX,), _NO_FAMILY)
    actions[_SOCKET[column]] = _socket_action()
    actions[_SETPRIORITY[column]] = (
        (_LOAD, 0, 0, _ARG0),
        (_JEQ, 2, 0, _PRIO_USER),
        (_LOAD, 0, 0, _ARG1),
        (_JEQ, 0, 1, _FIRST_PROCESS),
        *_returns(_EPERM),
        *_returns(_ALLOW),
    )
    for numbers in _CHANGE_A_PROCESS:
        actions[numbers[column]] = (
            (_LOAD, 0, 0, _ARG0),
            (_JEQ, 0, 1, _FIRST_PROCESS),
            *_returns(_EPERM),
            *_returns(_ALLOW),
        )
    start = [
        (_LOAD, 0, 0, _ARCH),
        (_JEQ, 1, 0, _AUDIT_ARCH[machine]),
        *_returns(_KILL),
        (_LOAD, 0, 0, _NR),
        # On x86_64 this covers the x32 calls too, whose numbers have a high bit set.
        (_JGE, 0, 1, _NEWEST_KNOWN + 1),
        *_returns(_ENOSYS),
    ]
    code = [*start, *_search(_ranges(actions))]
    return b"".join(struct.pack("=HBBI", *step) for step in code)


def _returns(action: int) -> _Action:
    return ((_RETURN, 0, 0, action),)


def _one_of(argument: int, values: tuple[int, ...], otherwise: int) -> _Action:
    """Allows a call whose argument has one of these values."""
    count = len(values)
    tests = [(_JEQ, count - at, 0, value) for at, value in enumerate(values)]
    return ((_LOAD, 0, 0, argument), *tests, *_returns(otherwise), *_returns(_ALLOW))


def _socket_action() -> _Action:
    """By family, and within some families by protocol: the others load modules of the kernel."""
    inet = _one_of(_ARG2, _INTERNET_PROTOCOLS, _NO_PROTOCOL)
    netlink = _one_of(_ARG2, (0,), _NO_PROTOCOL)  # routes: what names and addresses come from
    return (
        (_LOAD, 0, 0, _ARG0),
        (_JEQ, 4 + len(netlink), 0, _INET),
        (_JEQ, 3 + len(netlink), 0, _INET6),
        (_JEQ, 2, 0, _NETLINK),
        (_JEQ, 1 + len(netlink) + len(inet) - 1, 0, _UNIX),
        *_returns(_NO_FAMILY),
        *netlink,
        *inet,
    )


def _ranges(actions: dict[int, _Action]) -> list[tuple[int, _Action]]:
    """Where stretches of system calls with the same action begin: (first number, action)."""
    allowed = _returns(_ALLOW)
    ranges = [(0, allowed)]
    for number in sorted(actions):
        if ranges[-1][0] == number:
            ranges.pop()
        if not ranges or ranges[-1][1] != actions[number]:
            ranges.append((number, actions[number]))
        ranges.append((number + 1, allowed))
    return ranges


def _search(ranges: list[tuple[int, _Action]]) -> list[_Step]:
    """Binary search for a number's range.

    The kernel runs a filter over every system call's number when it is installed; a list of
    comparisons would make that the largest part of a sandbox's start.
    """
    if len(ranges) == 1:
        return list(ranges[0][1])
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
