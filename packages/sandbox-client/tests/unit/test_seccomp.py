"""The filter, run by a small interpreter of its instructions."""

import errno
import struct

import pytest
from sandbox_client.backends.local.jail.seccomp import (
    _CHANGE_A_PROCESS,
    _DENIED,
    _NEWEST_KNOWN,
    _SETPRIORITY,
    build_filter,
    is_supported,
)

X86_64, AARCH64 = 0xC000003E, 0xC00000B7
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000


def decide(program: bytes, number: int, arch: int, *arguments: int) -> int:
    given = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("<IIQ6Q", number, arch, 0, *given)
    code = list(struct.iter_unpack("=HBBI", program))
    at = accumulator = 0
    while True:
        op, if_true, if_false, k = code[at]
        at += 1
        if op == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif op == 0x06:
            return int(k)
        else:
            holds = {
                0x15: accumulator == k,
                0x35: accumulator >= k,
                0x45: bool(accumulator & k),
            }[op]
            at += if_true if holds else if_false


# What Docker's default profile (moby/profiles, June 2026) refuses a container that has no
# capabilities, by the numbers of x86_64; `clone` and `socket` have tests of their own.
REFUSED_BY_DOCKER = {
    "_sysctl": 156, "acct": 163, "add_key": 248, "afs_syscall": 183, "bpf": 321, "chroot": 161,
    "clock_settime": 227, "create_module": 174, "delete_module": 176, "fanotify_init": 300,
    "finit_module": 313, "fsconfig": 431, "fsmount": 432, "fsopen": 430, "fspick": 433,
    "get_kernel_syms": 177, "get_mempolicy": 239, "getpmsg": 181, "init_module": 175,
    "io_uring_enter": 426, "io_uring_register": 427, "io_uring_setup": 425, "ioperm": 173,
    "iopl": 172, "kcmp": 312, "kexec_file_load": 320, "kexec_load": 246, "keyctl": 250,
    "lookup_dcookie": 212, "lsm_get_self_attr": 459, "lsm_list_modules": 461,
    "lsm_set_self_attr": 460, "mbind": 237, "migrate_pages": 256, "mount": 165,
    "mount_setattr": 442, "move_mount": 429, "move_pages": 279, "nfsservctl": 180,
    "open_by_handle_at": 304, "open_tree": 428, "perf_event_open": 298, "pidfd_getfd": 438,
    "pivot_root": 155, "process_madvise": 440, "putpmsg": 182, "query_module": 178,
    "quotactl": 179, "quotactl_fd": 443, "reboot": 169, "request_key": 249, "security": 185,
    "set_mempolicy": 238, "set_mempolicy_home_node": 450, "setdomainname": 171,
    "sethostname": 170, "setns": 308, "settimeofday": 164, "swapoff": 168, "swapon": 167,
    "sysfs": 139, "syslog": 103, "tuxcall": 184, "umount2": 166, "unshare": 272, "uselib": 134,
    "userfaultfd": 323, "ustat": 136, "vhangup": 153, "vserver": 236,
}  # fmt: skip
REFUSED_BESIDES = {
    "name_to_handle_at": 303, "process_vm_readv": 310, "process_vm_writev": 311, "ptrace": 101,
}  # fmt: skip


@pytest.mark.parametrize("name", [*REFUSED_BY_DOCKER, *REFUSED_BESIDES])
def test_calls_that_no_command_needs_are_refused(name: str) -> None:
    number = (REFUSED_BY_DOCKER | REFUSED_BESIDES)[name]
    assert decide(build_filter("x86_64"), number, X86_64) == ERRNO | errno.EPERM
    on_arm = _DENIED[name][1]
    if on_arm is not None:
        assert decide(build_filter("aarch64"), on_arm, AARCH64) == ERRNO | errno.EPERM


def test_the_list_refuses_nothing_else() -> None:
    assert _DENIED.keys() == REFUSED_BY_DOCKER.keys() | REFUSED_BESIDES.keys()


@pytest.mark.parametrize(
    "number", [0, 1, 2, 9, 57, 58, 59, 61, 202, 231, 257, 262, 424, 436, 439, 449, 451, 462, 466]
)
def test_ordinary_calls_are_allowed(number: int) -> None:
    assert decide(build_filter("x86_64"), number, X86_64) == ALLOW


def test_calls_that_are_newer_than_the_list_do_not_exist() -> None:
    for number in (467, 470, 500, 1000):
        assert decide(build_filter("x86_64"), number, X86_64) == ERRNO | errno.ENOSYS


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_first_process_keeps_its_limits_and_its_priority(machine: str) -> None:
    program, arch = build_filter(machine), {"x86_64": X86_64, "aarch64": AARCH64}[machine]
    column = ["x86_64", "aarch64"].index(machine)
    for numbers in _CHANGE_A_PROCESS:
        assert decide(program, numbers[column], arch, 1) == ERRNO | errno.EPERM
        for other in (0, 2, 1001):
            assert decide(program, numbers[column], arch, other) == ALLOW
    setpriority = _SETPRIORITY[column]
    for which, who, allowed in ((0, 0, True), (0, 7, True), (0, 1, False), (1, 0, True)):
        assert (decide(program, setpriority, arch, which, who) == ALLOW) == allowed
    assert decide(program, setpriority, arch, 2, 65534) == ERRNO | errno.EPERM  # a user's all


def test_personalities_are_linuxs_own() -> None:
    program = build_filter("x86_64")
    for persona in (0, 8, 0x20000, 0x20008, 0xFFFFFFFF):
        assert decide(program, 135, X86_64, persona) == ALLOW
    for persona in (1, 0x0040000, 0x0400000):
        assert decide(program, 135, X86_64, persona) == ERRNO | errno.EPERM


def test_forking_is_allowed_but_new_namespaces_are_not() -> None:
    program = build_filter("x86_64")
    assert decide(program, 56, X86_64, 17) == ALLOW  # SIGCHLD: a fork
    assert decide(program, 56, X86_64, 0x003D0F00) == ALLOW  # a thread
    for flag in (0x20000, 0x10000000, 0x20000000, 0x40000000, 0x02000000):
        assert decide(program, 56, X86_64, flag | 17) == ERRNO | errno.EPERM
    assert decide(program, 435, X86_64) == ERRNO | errno.ENOSYS  # clone3: libc uses clone then


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_only_common_sockets_are_allowed(machine: str) -> None:
    program, arch = build_filter(machine), {"x86_64": X86_64, "aarch64": AARCH64}[machine]
    socket, pair = {"x86_64": (41, 53), "aarch64": (198, 199)}[machine]
    for family in (1, 2, 10, 16):
        assert decide(program, socket, arch, family, 1, 0) == ALLOW
    for family in (0, 3, 17, 38, 40, 44):  # packet, alg, vsock, xdp among them
        assert decide(program, socket, arch, family) == ERRNO | errno.EAFNOSUPPORT
    for family in (2, 10):
        for protocol in (1, 6, 17, 58):
            assert decide(program, socket, arch, family, 1, protocol) == ALLOW
        for protocol in (33, 132, 136, 255, 262):  # dccp, sctp, udplite, raw, mptcp
            found = decide(program, socket, arch, family, 1, protocol)
            assert found == ERRNO | errno.EPROTONOSUPPORT
    for protocol in (1, 4, 6, 12, 15):  # all of netlink but routes
        assert decide(program, socket, arch, 16, 3, protocol) == ERRNO | errno.EPROTONOSUPPORT
    assert decide(program, pair, arch, 1) == ALLOW
    assert decide(program, pair, arch, 2) == ERRNO | errno.EAFNOSUPPORT


def test_other_architectures_cannot_slip_through() -> None:
    program = build_filter("x86_64")
    assert decide(program, 11, 0x40000003) == KILL  # 32-bit calls have other numbers
    assert decide(program, 0x40000000 + 165, X86_64) == ERRNO | errno.ENOSYS  # x32


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_call_has_the_action_that_the_table_says(machine: str) -> None:
    program, arch = build_filter(machine), {"x86_64": X86_64, "aarch64": AARCH64}[machine]
    column = ["x86_64", "aarch64"].index(machine)
    denied = {numbers[column] for numbers in _DENIED.values()} | {435}
    by_argument = {"x86_64": {41, 53}, "aarch64": {198, 199}}[machine]  # family 0 is refused
    for number in range(_NEWEST_KNOWN + 1):
        if number not in by_argument:
            assert (decide(program, number, arch) == ALLOW) == (number not in denied), number


def test_an_unknown_architecture_has_no_filter() -> None:
    assert not is_supported("riscv64")
