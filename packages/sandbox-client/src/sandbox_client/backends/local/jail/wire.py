"""Messages between the service, the launcher and the processes it starts.

One message a packet over a SOCK_SEQPACKET pair, with file descriptors beside it. A packet is a row
of fields, the first of which says what it is; each ends with a NUL, which no field contains. What
comes out of a sandbox is parsed as data and nothing else. `launcher/wire.c` is the same in C.
"""

import array
import os
import socket
from collections.abc import Sequence

__all__ = [
    "MAX_PACKET_BYTES",
    "Field",
    "Reader",
    "encode",
    "receive",
    "receive_packet",
    "send",
    "send_packet",
]

MAX_PACKET_BYTES = 192 * 1024
"""Largest message. A command line with its environment must fit."""

Field = str | int

_FD_BYTES = array.array("i").itemsize


def encode(*fields: Field) -> bytes:
    """A message as a packet.

    Raises:
        ValueError: it is too long, or a field contains a NUL.
    """
    raw = os.fsencode("\0".join(map(str, fields)) + "\0")
    if raw.count(b"\0") != len(fields):
        raise ValueError("a field of a message contains a NUL")
    if len(raw) > MAX_PACKET_BYTES:
        raise ValueError(f"message of {len(raw)} bytes, at most {MAX_PACKET_BYTES} fit")
    return raw


class Reader:
    """The fields of a received message, taken one after the other."""

    def __init__(self, raw: bytes) -> None:
        if raw[-1:] != b"\0":
            raise ValueError("a packet that is cut off or has no end is not a message")
        self._fields = os.fsdecode(raw[:-1]).split("\0")
        self._at = 0

    def text(self) -> str:
        """The next field; raises `ValueError` if there is none."""
        if self._at == len(self._fields):
            raise ValueError("a message lacks a field")
        self._at += 1
        return self._fields[self._at - 1]

    def number(self) -> int:
        """The next field; raises `ValueError` if it is not a number."""
        return int(self.text())

    def texts(self) -> list[str]:
        """A counted row: its length, then as many fields."""
        return [self.text() for _ in range(self.number())]

    def rest(self) -> list[str]:
        """All that is left."""
        at, self._at = self._at, len(self._fields)
        return self._fields[at:]


def send_packet(channel: socket.socket, raw: bytes, fds: Sequence[int] = ()) -> None:
    """Sends a packet with descriptors beside it; raises `OSError` if that cannot be."""
    if fds:
        socket.send_fds(channel, [raw], list(fds))
    else:
        channel.send(raw)


def send(channel: socket.socket, *fields: Field, fds: Sequence[int] = ()) -> None:
    """Encodes and sends a message."""
    send_packet(channel, encode(*fields), fds)


def receive_packet(
    channel: socket.socket, max_fds: int, flags: int = 0
) -> tuple[bytes, list[int], int]:
    """One packet with its descriptors, which no child inherits, and the flags of recvmsg(2)."""
    # Not `socket.recv_fds`: it drops the flags that it is given.
    space = socket.CMSG_SPACE(max_fds * _FD_BYTES) if max_fds else 0
    raw, ancillary, found, _ = channel.recvmsg(
        MAX_PACKET_BYTES, space, flags | socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
    return raw, list(fds), found


def receive(channel: socket.socket, *, max_fds: int = 0) -> tuple[Reader, list[int]] | None:
    """The next message and its descriptors; None when the other end is gone.

    Raises:
        BlockingIOError: nothing is there (non-blocking channels).
        ValueError: the packet is not a message.
    """
    raw, fds, flags = receive_packet(channel, max_fds)
    if not raw:
        return None
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raw = b""
    try:
        return Reader(raw), fds
    except ValueError:
        for fd in fds:
            os.close(fd)
        raise
