"""The warm interpreter that joins sandboxes: what it says, whatever becomes of it."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sandbox_client.backends.local.jail import kernel, wire
from sandbox_client.backends.local.jail.python_args import BASE_ENVIRON
from sandbox_client.backends.local.jail.zygote import Zygote

VARIABLES = [f"{name}={value}" for name, value in BASE_ENVIRON.items()]


def fork_and_end() -> int:
    """Forks as `kernel.fork`, but of the two only the child lives on."""
    if os.fork():
        os._exit(0)
    return 0


@contextmanager
def ending_with_its_first_fork(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> Iterator[socket.socket]:
    """An interpreter that is killed just after it has forked; gives the first process's end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    null = os.open(os.devnull, os.O_RDWR)
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            monkeypatch.setattr(kernel, "fork", fork_and_end)
            Zygote(theirs, listener, null).serve()
        finally:
            os._exit(0)  # in the program, which does nothing
    theirs.close()
    os.close(null)
    ours.settimeout(20)
    with ours:
        yield ours
    os.waitpid(pid, 0)


def test_a_program_is_known_to_run_though_its_interpreter_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ending_with_its_first_fork(listener, monkeypatch) as channel:
        command: list[wire.Field] = ["python", "/", 3, "python", "-c", "pass", *VARIABLES]
        with open(os.devnull, "rb+") as null:  # noqa: PTH123
            wire.send(channel, "run", 7, *command, fds=[null.fileno()] * 3)
        said = [wire.receive(channel) for _ in range(3)]
    assert said[0] is not None
    assert said[0][0].text() == "ready"
    assert said[1] is not None
    assert [said[1][0].text(), said[1][0].number()] == ["started", 7]
    assert said[2] is None


def test_a_stand_in_knows_that_its_program_runs_though_the_interpreter_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")  # the kernel gives it an abstract name
    listener.listen()
    with (
        ending_with_its_first_fork(listener, monkeypatch),
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as shim,
        open(os.devnull, "rb+") as null,  # noqa: PTH123
    ):
        shim.settimeout(20)
        shim.connect(listener.getsockname())
        request = "\0".join(["3", "/", "python", "-c", "pass", *VARIABLES, ""])
        socket.send_fds(shim, [request.encode()], [null.fileno()] * 3)
        assert shim.recv(16) == b"S"
        assert shim.recv(16) == b""
