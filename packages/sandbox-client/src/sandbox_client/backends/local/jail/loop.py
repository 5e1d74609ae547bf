"""The loop of a process that starts Python programs in forks of itself, for a channel and shims."""

import os
import select
import signal
import socket

from sandbox_client.backends.local.jail.forking import leave
from sandbox_client.backends.local.jail.python_args import PythonRun
from sandbox_client.backends.local.jail.shims import Shims

__all__ = ["ProgramLoop"]


class ProgramLoop:
    """What a first process and a zygote have alike.

    Whatever returns a `PythonRun` does so only in a forked child that is to run that program.
    """

    def __init__(self, channel: socket.socket, listener: socket.socket) -> None:
        self._channel = channel
        self._poll = select.poll()
        self._shims = Shims(self._poll, listener)
        self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def serve(self) -> PythonRun:
        """Works until the other end of the channel goes away, then ends the process."""
        signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        for fd in (self._channel.fileno(), self._wake[0]):
            self._poll.register(fd, select.POLLIN)
        try:
            self._begin()
            while True:
                for fd, _ in self._poll.poll():
                    run = self._handle(fd)
                    if run is not None:
                        return run
        except (BrokenPipeError, ConnectionError):
            os._exit(0)

    def rehearse_once(self) -> PythonRun | None:
        """Takes one message and sees what it starts to its end; see `rehearsal`."""
        run = self._from_channel()
        if run is None:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            self._reap()
        return run

    def close(self) -> None:
        """Lets go of everything, after a rehearsal."""
        self._channel.close()
        self._shims.close()
        for fd in self._wake:
            os.close(fd)

    def _handle(self, fd: int) -> PythonRun | None:
        if fd == self._channel.fileno():
            return self._from_channel()
        if fd == self._wake[0]:
            os.read(fd, 4096)
            self._reap()
        elif fd in self._shims:
            return self._from_shim(fd)
        return None

    def _leave(self, fds: list[int]) -> None:
        """In a forked child: keeps nothing but `fds`, as its standard streams."""
        self._channel.detach()
        self._shims.detach()
        leave(fds)

    def _begin(self) -> None:
        """What comes before the first message."""

    def _from_channel(self) -> PythonRun | None:
        raise NotImplementedError

    def _from_shim(self, fd: int) -> PythonRun | None:
        raise NotImplementedError

    def _reap(self) -> None:
        raise NotImplementedError
