"""Acting as the sandbox's user: the whole identity, of one thread, and back again."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sandbox_client.backends.local.files import _Sized
from sandbox_client.backends.local.jail import kernel

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


def status(thread: int) -> dict[str, str]:
    lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def identity(thread: int) -> tuple[list[str], list[str], list[str], str]:
    found = status(thread)
    return found["Uid"].split(), found["Gid"].split(), found["Groups"].split(), found["CapEff"]


def test_one_thread_is_somebody_else_and_becomes_itself_again() -> None:
    main = threading.get_native_id()
    before = identity(main)
    seen = {}

    def work() -> None:
        me = threading.get_native_id()
        tie = kernel.take_identity(65534, 65533)
        try:
            seen["within"] = identity(me)
            seen["main"] = identity(main)
        finally:
            kernel.leave_identity(65534, os.getgroups(), tie)
        seen["after"] = identity(me)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen["within"] == (
        ["0", "65534", "0", "65534"],
        ["0", "65533", "0", "65533"],
        [],
        "0" * 16,
    )
    assert seen["main"] == seen["after"] == before


def test_a_user_namespaces_root_lays_down_its_capabilities() -> None:
    me = threading.get_native_id()
    before = identity(me)
    tie = kernel.take_identity(0, 0)
    try:
        assert identity(me)[3] == "0" * 16
    finally:
        kernel.leave_identity(0, (), tie)
    assert identity(me) == before


# A parent with a child that is tied to it, and acts as somebody else before or while it dies.
TIED = """
import os, signal, sys, time
from sandbox_client.backends.local.jail import kernel
parent, (told, tell) = os.getpid(), os.pipe()
if os.fork():
    os.read(told, 1)
    os._exit(0)
kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
tie = kernel.take_identity(65534, 65533)
if sys.argv[1] == "before":
    kernel.leave_identity(65534, (), tie)
os.write(tell, b"x")
while os.getppid() == parent:
    time.sleep(0.01)
if sys.argv[1] == "while":
    kernel.leave_identity(65534, (), tie)
time.sleep(1)
print("it lives")
"""


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_process_that_was_somebody_else_still_dies_with_its_parent(when: str) -> None:
    command = [sys.executable, "-c", TIED, when]
    assert subprocess.run(command, capture_output=True, check=True, timeout=30).stdout == b""


def test_a_file_that_shrinks_while_it_is_packed_is_filled_up(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    with (tmp_path / "file").open("rb") as file:
        sized = _Sized(file, 6)
        assert [sized.read(5), sized.read(5), sized.read(5)] == [b"1234\0", b"\0", b""]
    (tmp_path / "file").write_bytes(b"123456789")
    with (tmp_path / "file").open("rb") as file:
        assert _Sized(file, 6).read(100) == b"123456"
