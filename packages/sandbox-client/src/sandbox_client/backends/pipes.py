"""The pipes of a running command: bounded output, input with back-pressure."""

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Callable

from sandbox_client.core.output import BoundedOutput

__all__ = ["OutputPipe", "feed_stdin"]

_READ_BYTES = 64 * 1024
_READS_A_TURN = 16
# Most commands are over sooner; their output is then read at once, without any waiting for it.
_WATCH_AFTER_S = 0.01
# What a background process writes is drained at leisure: it must not keep the service busy.
_BACKGROUND_PAUSE_S = 0.05


class OutputPipe:
    """The reading end of a command's output.

    It is always drained, so a command never blocks on it; only a bounded part is kept. With `room`
    it is passed on whole instead, and read only while that is set. After the command has ended a
    background process may hold the other end: what it writes is dropped.
    """

    def __init__(
        self,
        max_bytes: int,
        on_head: Callable[[bytes], None] | None,
        ends: tuple[int, int],
        room: asyncio.Event | None = None,
    ) -> None:
        self._fd, self._write_fd = ends
        os.set_blocking(self._fd, False)
        self._kept = BoundedOutput(max_bytes)
        self._head: list[bytes] = []
        self._on_head = on_head
        self._room = room
        self._waiting: asyncio.Task[None] | None = None
        self._ended = False
        self._loop = asyncio.get_running_loop()
        self._watched = False
        self._watch_timer = self._loop.call_later(_WATCH_AFTER_S, self.watch)

    @property
    def write_fd(self) -> int:
        """The end for the command; close it with `close_write` once it has been passed on."""
        return self._write_fd

    @property
    def closed(self) -> bool:
        """Whether nobody can write to it any more."""
        return self._fd < 0

    @property
    def omitted_bytes(self) -> int:
        """Bytes that were not kept."""
        return self._kept.omitted_bytes

    def close_write(self) -> None:
        """Closes the service's own copy of the writing end."""
        if self._write_fd >= 0:
            os.close(self._write_fd)
            self._write_fd = -1

    def watch(self) -> None:
        """Reads from now on whenever something comes."""
        if not self._watched and self._fd >= 0:
            self._watched = True
            self._loop.add_reader(self._fd, self._readable)

    def finish(self) -> bytes:
        """Takes what the ended command has written; returns the kept output."""
        # As much as a pipe can hold; without the bound, a background process could keep this going.
        for _ in range(_READS_A_TURN):
            if not self._read_once():
                break
        self._ended = True
        if self._waiting is not None:
            # A background process may go on writing; nobody waits for room any more.
            self._waiting.cancel()
            self._waiting = None
            if self._fd >= 0:
                self._loop.add_reader(self._fd, self._readable)
        return b"".join(self._head) + self._kept.finish()

    def close(self) -> None:
        """Stops reading; a process that still writes gets an error."""
        self.close_write()
        self._watch_timer.cancel()
        if self._waiting is not None:
            self._waiting.cancel()
        if self._fd >= 0:
            if self._watched:
                self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _readable(self) -> None:
        # A bounded number of reads, so that one flood leaves the others their turn.
        for _ in range(_READS_A_TURN):
            if self._room is not None and not self._room.is_set() and not self._ended:
                self._loop.remove_reader(self._fd)
                self._waiting = self._loop.create_task(self._read_on(self._room))
                return
            if not self._read_once():
                break
        if self._ended and self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self._watched = False
            self._watch_timer = self._loop.call_later(_BACKGROUND_PAUSE_S, self.watch)

    async def _read_on(self, room: asyncio.Event) -> None:
        await room.wait()
        self._waiting = None
        self._loop.add_reader(self._fd, self._readable)

    def _read_once(self) -> bool:
        if self._fd < 0:
            return False
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        if self._ended:
            return True
        part = self._kept.feed(data) if self._room is None else data
        if part:
            if self._room is None:
                self._head.append(part)
            if self._on_head is not None:
                self._on_head(part)
        return True


async def feed_stdin(fd: int, data: AsyncIterator[bytes]) -> None:
    """Writes a command's input as fast as it reads; closes `fd` at the end.

    A command that has closed its input is not an error: what is left goes nowhere.
    """
    os.set_blocking(fd, False)
    try:
        async for part in data:
            rest = memoryview(part)
            while rest:
                try:
                    rest = rest[os.write(fd, rest) :]
                except BlockingIOError:
                    await _writable(fd)
                except OSError as error:
                    if error.errno != errno.EPIPE:
                        raise
                    return
    finally:
        os.close(fd)


async def _writable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_writer(fd, wake)
    try:
        await ready
    finally:
        with contextlib.suppress(ValueError):
            loop.remove_writer(fd)
