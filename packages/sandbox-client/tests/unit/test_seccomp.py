"""The filter, run by a small interpreter of its instructions."""

import errno
import struct

import pytest
from sandbox_client.backends.local.jail.seccomp import build_filter, is_supported

X86_64, AARCH64 = 0xC000003E, 0xC00000B7
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000


def decide(program: bytes, number: int, arch: int, arg0: int = 0) -> int:
    data = struct.pack("<IIQ6Q", number, arch, 0, arg0, 0, 0, 0, 0, 0)
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


@pytest.mark.parametrize(
    "number", [165, 166, 155, 272, 308, 101, 321, 425, 248, 250, 246, 323, 298, 438, 103, 161]
)
def test_dangerous_calls_are_refused(number: int) -> None:
    assert decide(build_filter("x86_64"), number, X86_64) == ERRNO | errno.EPERM


@pytest.mark.parametrize(
    "number", [0, 1, 2, 9, 57, 58, 59, 61, 202, 231, 257, 262, 424, 436, 439, 450]
)
def test_ordinary_calls_are_allowed(number: int) -> None:
    assert decide(build_filter("x86_64"), number, X86_64) == ALLOW


def test_forking_is_allowed_but_new_namespaces_are_not() -> None:
    program = build_filter("x86_64")
    assert decide(program, 56, X86_64, arg0=17) == ALLOW  # SIGCHLD: a fork
    assert decide(program, 56, X86_64, arg0=0x003D0F00) == ALLOW  # a thread
    for flag in (0x20000, 0x10000000, 0x20000000, 0x40000000, 0x02000000):
        assert decide(program, 56, X86_64, arg0=flag | 17) == ERRNO | errno.EPERM
    assert decide(program, 435, X86_64) == ERRNO | errno.ENOSYS  # clone3: libc uses clone then


def test_only_common_socket_families_are_allowed() -> None:
    program = build_filter("x86_64")
    for family in (1, 2, 10, 16):
        assert decide(program, 41, X86_64, arg0=family) == ALLOW
    for family in (0, 3, 17, 38, 40, 44):  # packet, alg, vsock, xdp among them
        assert decide(program, 41, X86_64, arg0=family) == ERRNO | errno.EAFNOSUPPORT


def test_other_architectures_cannot_slip_through() -> None:
    program = build_filter("x86_64")
    assert decide(program, 11, 0x40000003) == KILL  # 32-bit calls have other numbers
    assert decide(program, 0x40000000 + 165, X86_64) == ERRNO | errno.ENOSYS  # x32


def test_every_call_has_the_action_that_the_table_says() -> None:
    from sandbox_client.backends.local.jail.seccomp import _DENIED

    for machine, arch, column in (("x86_64", X86_64, 0), ("aarch64", AARCH64, 1)):
        program = build_filter(machine)
        denied = {numbers[column] for numbers in _DENIED.values()}
        special = {(56, 220)[column], (435, 435)[column], (41, 198)[column]}
        for number in range(600):
            if number not in special:
                allowed = decide(program, number, arch) == ALLOW
                assert allowed == (number not in denied), number
        assert len(program) // 8 < 256  # jumps have eight bits


def test_an_unknown_architecture_has_no_filter() -> None:
    assert not is_supported("riscv64")
