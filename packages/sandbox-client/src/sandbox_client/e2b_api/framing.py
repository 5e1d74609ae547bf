"""Connect's envelopes: five bytes of prefix (flags, length) before each message of a stream.

Pure: bytes in, bytes out. Source: the Connect protocol, "Streaming RPCs".
"""

import json
from dataclasses import dataclass

__all__ = ["END_OF_STREAM", "Envelope", "EnvelopeReader", "FramingError", "end_of_stream", "wrap"]

COMPRESSED = 0b01
END_OF_STREAM = 0b10
_PREFIX_BYTES = 5


class FramingError(ValueError):
    """The bytes are not a stream of envelopes, or break a bound; the message says how."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """One message of a stream."""

    flags: int
    data: bytes

    @property
    def ends_stream(self) -> bool:
        """Whether it carries the stream's outcome instead of a message."""
        return bool(self.flags & END_OF_STREAM)


def wrap(message: bytes, flags: int = 0) -> bytes:
    """Puts one message into an envelope."""
    return bytes((flags,)) + len(message).to_bytes(4, "big") + message


def end_of_stream(error: dict[str, str] | None = None) -> bytes:
    """The envelope that ends a response: with nothing, or with an error's `code` and `message`."""
    outcome = {} if error is None else {"error": error}
    return wrap(json.dumps(outcome).encode(), END_OF_STREAM)


class EnvelopeReader:
    """Cuts a stream of bytes, in pieces of any size, into envelopes.

    Args:
        max_message_bytes: A longer message is refused as soon as its prefix is there, so no more
            than this is ever held.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._held = bytearray()

    def feed(self, data: bytes) -> list[Envelope]:
        """Takes the next bytes; returns the envelopes that are complete now.

        Raises:
            FramingError: a message is compressed, has unknown flags, or is too long.
        """
        self._held += data
        envelopes = []
        at = 0
        while len(self._held) - at >= _PREFIX_BYTES:
            flags = self._held[at]
            if flags & ~END_OF_STREAM:
                what = "is compressed" if flags == COMPRESSED else f"has unknown flags {flags:#x}"
                raise FramingError(f"a message {what}; expected plain JSON")
            size = int.from_bytes(self._held[at + 1 : at + _PREFIX_BYTES], "big")
            if size > self._max_message_bytes:
                raise FramingError(
                    f"a message has {size} bytes, at most {self._max_message_bytes} are taken"
                )
            end = at + _PREFIX_BYTES + size
            if end > len(self._held):
                break
            envelopes.append(Envelope(flags, bytes(self._held[at + _PREFIX_BYTES : end])))
            at = end
        del self._held[:at]
        return envelopes

    def finish(self) -> None:
        """Tells that no more bytes come.

        Raises:
            FramingError: the last message is cut short.
        """
        if self._held:
            raise FramingError(f"the stream ends within a message, {len(self._held)} bytes into it")
