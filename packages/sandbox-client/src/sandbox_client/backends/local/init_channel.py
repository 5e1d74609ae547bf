"""The service's end of the channel to a sandbox's first process."""

import asyncio
import os
import socket
from collections.abc import Callable, Sequence

from sandbox_client.backends.local.jail import wire
from sandbox_client.backends.local.packets import PacketSender
from sandbox_client.backends.running import Ended
from sandbox_client.errors import SandboxGone, TooLarge

__all__ = ["InitChannel"]


class InitChannel:
    """Sends commands, receives their ends, and notices when the sandbox is lost.

    States: starting -> living -> lost; `ready` is set on the way to living or holds the failure.
    """

    def __init__(
        self, channel: socket.socket, sandbox_id: str, new_oom_kills: Callable[[], int]
    ) -> None:
        self._channel = channel
        self._sandbox_id = sandbox_id
        self._new_oom_kills = new_oom_kills
        self._loop = asyncio.get_running_loop()
        self._ended: dict[int, asyncio.Future[Ended]] = {}
        self._next_exec = 0
        self._cause = "other"
        self.lost = ""
        """Why the sandbox is not living any more; empty while it is."""
        self.ready: asyncio.Future[list[int]] = self._loop.create_future()
        """Descriptors of the sandbox's root folder and of its overlay's upper layer; for a fork of
        a snapshot also of all that lies below that layer."""
        self._mounted: list[int] = []
        # Nobody may be waiting any more when it fails.
        self.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        channel.setblocking(False)
        self._sender = PacketSender(
            channel, lambda why: self.lose(f"its first process cannot be reached: {why}")
        )
        self._loop.add_reader(channel.fileno(), self._read)

    def require_living(self) -> None:
        """Raises `SandboxGone` if the sandbox is not living."""
        if self.lost:
            raise self._gone()

    def expect_end(self) -> tuple[int, asyncio.Future[Ended]]:
        """A number for a new command, and how it ended once it has."""
        self.require_living()
        number = self._next_exec
        self._next_exec += 1
        self._ended[number] = self._loop.create_future()
        return number, self._ended[number]

    def forget(self, number: int) -> None:
        """Takes no more interest in a command's end."""
        self._ended.pop(number).cancel()

    def send(self, *fields: wire.Field, fds: Sequence[int] = ()) -> None:
        """Sends a message.

        Raises:
            TooLarge: it does not fit into one packet.
            SandboxGone: the first process cannot be reached.
        """
        self.require_living()
        try:
            self._sender.send(*fields, fds=fds)
        except ValueError as error:
            raise TooLarge(f"the command with its environment is too long: {error}") from error
        except OSError as error:
            self.lose(f"its first process cannot be reached: {error.strerror}")
            raise self._gone() from error

    def lose(self, why: str) -> None:
        """Declares the sandbox lost; whoever waits is told."""
        if self.lost:
            return
        if self._new_oom_kills():
            self._cause = "memory_limit"
            why += "; its memory limit was reached"
        self.lost = why
        self._sender.close()
        self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        if self.ready.cancelled() or not self.ready.done():
            _close_all(self._mounted)
        if not self.ready.done():
            self.ready.set_exception(self._gone())
        for ended in self._ended.values():
            if not ended.done():
                ended.set_exception(self._gone())

    def _gone(self) -> SandboxGone:
        return SandboxGone(
            f"sandbox {self._sandbox_id} is gone: {self.lost}", metadata={"cause": self._cause}
        )

    def _read(self) -> None:
        try:
            while not self.lost:
                received = wire.receive(self._channel, max_fds=0 if self.ready.done() else 3)
                if received is None:
                    self.lose("its first process ended")
                    return
                self._handle(*received)
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            self.lose(f"its first process cannot be understood: {error}")

    def _handle(self, fields: wire.Reader, fds: list[int]) -> None:
        match fields.text():
            case "mounted" if not self._mounted and len(fds) in (2, 3):
                self._mounted = fds
                return
            case "ready" if not self.ready.done() and self._mounted:
                self.ready.set_result(self._mounted)
            case "failed" if not self.ready.done():
                self.lose(f"cannot {fields.text()}: {fields.text()}")
            case "ended":
                ended = self._ended.get(fields.number())
                status, wall_us, cpu_us = fields.number(), fields.number(), fields.number()
                if ended is not None and not ended.done():
                    ended.set_result(Ended(status, wall_us / 1e6, cpu_us / 1e6))
        _close_all(fds)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
