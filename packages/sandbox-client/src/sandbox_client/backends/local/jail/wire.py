"""Messages between the service, the fork-server and the first processes of sandboxes.

One JSON object a packet over a SOCK_SEQPACKET pair, with file descriptors beside it. What comes
out of a sandbox is parsed as data and nothing else.
"""

import array
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

__all__ = [
    "MAX_PACKET_BYTES",
    "Message",
    "encode",
    "receive",
    "receive_packet",
    "send",
    "send_packet",
]

MAX_PACKET_BYTES = 192 * 1024
"""Largest message. A command line with its environment must fit."""

Message = dict[str, Any]

_FD_BYTES = array.array("i").itemsize


def encode(message: Message) -> bytes:
    """A message as a packet.

    Raises:
        ValueError: it is too long.
    """
    raw = json.dumps(message, separators=(",", ":")).encode()
    if len(raw) > MAX_PACKET_BYTES:
        raise ValueError(f"message of {len(raw)} bytes, at most {MAX_PACKET_BYTES} fit")
    return raw


def send_packet(channel: socket.socket, raw: bytes, fds: Sequence[int] = ()) -> None:
    """Sends a packet with descriptors beside it; raises `OSError` if that cannot be."""
    if fds:
        socket.send_fds(channel, [raw], list(fds))
    else:
        channel.send(raw)


def send(channel: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Encodes and sends a message."""
    send_packet(channel, encode(message), fds)


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


def receive(channel: socket.socket, *, max_fds: int = 0) -> tuple[Message, list[int]] | None:
    """The next message and its descriptors; None when the other end is gone.

    Raises:
        BlockingIOError: nothing is there (non-blocking channels).
        ValueError: the packet is not a message.
    """
    raw, fds, flags = receive_packet(channel, max_fds)
    if not raw:
        return None
    cut = flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
    try:
        message = None if cut else json.loads(raw)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        for fd in fds:
            os.close(fd)
        raise ValueError(f"a packet of {len(raw)} bytes is not a message")  # noqa: TRY004
    return message, fds
