# ruff: noqa: PTH119 -- keeps the fork-server small: no pathlib
"""Stand-ins for `python`: small programs that ask for a warm run on behalf of a shell's command.

Everything that comes from them is foreign: it may be nonsense, and never more than the asking
process could do itself.
"""

import os
import select
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass

from sandbox_client.backends.local.jail import template, wire
from sandbox_client.backends.local.jail.forking import kill
from sandbox_client.backends.local.jail.python_args import PythonRun, parse_python

__all__ = ["SHIM_PYTHONS", "ShimRequest", "Shims"]

SHIM_PYTHONS = (f"{template.SHIM_FOLDER}/python", f"{template.SHIM_FOLDER}/python3")

# Abstract names belong to the network namespace, so every sandbox has its own.
_ADDRESS = "\0tailrace-python"
_MAX_OPEN = 128
_STARTED = b"S"


@dataclass(frozen=True)
class ShimRequest:
    """One program to run, with its standard streams."""

    shim: socket.socket
    run: PythonRun
    fds: list[int]
    peer: int
    """Process that asks."""

    def tell_started(self) -> None:
        """In the program's process: from now on the stand-in must not run it itself."""
        with suppress(OSError):
            self.shim.send(_STARTED)


class Shims:
    """The connections of all stand-ins of a sandbox."""

    def __init__(self, poll: select.poll, listener: socket.socket) -> None:
        self._poll = poll
        self._listener = listener
        self._open: dict[int, socket.socket] = {}
        self._child_of: dict[int, int] = {}
        self._shim_of: dict[int, socket.socket] = {}

    def __contains__(self, fd: int) -> bool:
        return fd == self._listener.fileno() or fd in self._open

    def listen(self) -> None:
        """Takes the address."""
        self._listener.bind(_ADDRESS)
        self._listener.listen(16)
        self.attach()

    def attach(self) -> None:
        """Begins to take connections, of an address that is taken."""
        self._listener.setblocking(False)
        self._poll.register(self._listener.fileno(), select.POLLIN)

    def read(self, fd: int) -> ShimRequest | None:
        """Handles what has come on a descriptor; returns a program that is to be started."""
        if fd == self._listener.fileno():
            self._accept()
            return None
        shim = self._open[fd]
        try:
            raw, fds, flags = wire.receive_packet(shim, 3, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            raw, fds, flags = b"", [], 0
        child = self._child_of.get(fd)
        if child is not None:
            _close_all(fds)
            self._from_waiting(fd, child, raw)
            return None
        run = None
        if len(fds) == 3 and not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            # Foreign bytes: whatever is wrong with them must not end the first process.
            with suppress(Exception):
                run = _parse(raw)
        credentials = shim.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        peer = int.from_bytes(credentials[:4], sys.byteorder)
        # What a command has asked for must not begin after the command was killed.
        if run is None or not _lives(peer):
            _close_all(fds)
            self._drop(shim, None)
            return None
        return ShimRequest(shim, run, fds, peer)

    def started(self, asked: ShimRequest, pid: int) -> None:
        """The program runs as this child."""
        _close_all(asked.fds)
        self._child_of[asked.shim.fileno()] = pid
        self._shim_of[pid] = asked.shim

    def refuse(self, asked: ShimRequest) -> None:
        """The program could not be started: the stand-in becomes the real interpreter."""
        _close_all(asked.fds)
        self._drop(asked.shim, None)

    def ended(self, pid: int, status: int) -> None:
        """Tells the stand-in of a child, if it has one, how it ended."""
        shim = self._shim_of.pop(pid, None)
        if shim is not None:
            del self._child_of[shim.fileno()]
            self._drop(shim, status)

    def detach(self) -> None:
        """In a forked child: forgets the descriptors, which are about to be closed."""
        for shim in (self._listener, *self._open.values()):
            shim.detach()

    def close(self) -> None:
        """Gives the address up."""
        self._listener.close()

    def _accept(self) -> None:
        try:
            shim, _ = self._listener.accept()
        except OSError:
            return
        if len(self._open) >= _MAX_OPEN:
            shim.close()  # it runs the real interpreter itself then
            return
        self._open[shim.fileno()] = shim
        self._poll.register(shim.fileno(), select.POLLIN)

    def _from_waiting(self, fd: int, child: int, raw: bytes) -> None:
        """A byte is a signal that the stand-in got; its end is the end of the program."""
        if raw:
            kill(child, raw[0])
        else:
            self._poll.unregister(fd)
            kill(child)

    def _drop(self, shim: socket.socket, status: int | None) -> None:
        """Answers with an exit status, or with None: run the real interpreter."""
        # The stand-in, or its place in the poll, may be gone already.
        with suppress(OSError):
            shim.send(b"" if status is None else status.to_bytes(4, sys.byteorder))
        with suppress(KeyError):
            self._poll.unregister(shim.fileno())
        self._open.pop(shim.fileno(), None)
        shim.close()


def _parse(raw: bytes) -> PythonRun | None:
    """Reads `argc NUL cwd NUL argument NUL ... variable NUL ...`."""
    count, cwd, *rest = [os.fsdecode(part) for part in raw.split(b"\0")[:-1]]
    argv, variables = rest[: int(count)], rest[int(count) :]
    if not argv:
        return None
    environ = dict(v.split("=", 1) for v in variables if "=" in v)
    run = parse_python(argv, environ, cwd)
    if run is not None:
        run.executable = f"{template.SHIM_FOLDER}/{os.path.basename(argv[0])}"
    return run


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # not ours to signal, but there
    return True


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
