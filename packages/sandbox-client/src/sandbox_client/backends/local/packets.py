"""Sending packets from the event loop: what the other side has no room for yet waits in line."""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

from sandbox_client.backends.local.jail import wire

__all__ = ["PacketSender"]


class PacketSender:
    """The sending half of a non-blocking channel. `on_broken` is called if it breaks later on."""

    def __init__(self, channel: socket.socket, on_broken: Callable[[str], None]) -> None:
        self._channel = channel
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[bytes, list[int]]] = deque()

    def send(self, *fields: wire.Field, fds: Sequence[int] = ()) -> None:
        """Sends now or as soon as there is room; the descriptors may be closed afterwards.

        Raises:
            ValueError: the message is too long.
            OSError: the channel is broken.
        """
        raw = wire.encode(*fields)
        if not self._waiting:
            try:
                wire.send_packet(self._channel, raw, fds)
            except BlockingIOError:
                self._loop.add_writer(self._channel.fileno(), self._flush)
            else:
                return
        self._waiting.append((raw, [os.dup(fd) for fd in fds]))

    def close(self) -> None:
        """Forgets what was still waiting. The channel itself is its owner's to close."""
        if self._waiting:
            self._loop.remove_writer(self._channel.fileno())
        while self._waiting:
            _close_all(self._waiting.popleft()[1])

    def _flush(self) -> None:
        while self._waiting:
            raw, fds = self._waiting[0]
            try:
                wire.send_packet(self._channel, raw, fds)
            except BlockingIOError:
                return
            except OSError as error:
                self.close()
                self._on_broken(str(error))
                return
            self._waiting.popleft()
            _close_all(fds)
        self._loop.remove_writer(self._channel.fileno())


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
