"""Git's pack delta, as binary patches may carry it."""

__all__ = ["apply_delta"]


def apply_delta(delta: bytes, old: bytes) -> bytes:
    """The content that a delta makes of the old one.

    Raises:
        ValueError: the delta is damaged, or was made against other content.
    """
    reader = _Reader(delta)
    if reader.number() != len(old):
        raise ValueError("the binary delta was made against other content")
    size = reader.number()
    out = bytearray()
    while not reader.at_end:
        op = reader.byte()
        if op & 0x80:
            offset, length = reader.copy_range(op)
            if offset + length > len(old):
                raise ValueError("the binary delta copies from beyond the old content")
            out += old[offset : offset + length]
        elif op:
            out += reader.take(op)
        else:
            raise ValueError("the binary delta has an unknown instruction")
        if len(out) > size:
            raise ValueError("the binary delta gives more bytes than it announces")
    if len(out) != size:
        raise ValueError(f"the binary delta gives {len(out)} bytes, announced were {size}")
    return bytes(out)


class _Reader:
    def __init__(self, delta: bytes) -> None:
        self._delta = delta
        self._at = 0

    @property
    def at_end(self) -> bool:
        return self._at >= len(self._delta)

    def take(self, count: int) -> bytes:
        if self._at + count > len(self._delta):
            raise ValueError("the binary delta is cut short")
        self._at += count
        return self._delta[self._at - count : self._at]

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self) -> int:
        """A number of any size, seven bits a byte, lowest first."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value

    def copy_range(self, op: int) -> tuple[int, int]:
        """Offset and length of a copy; the bits of `op` tell which of their bytes follow."""
        offset = length = 0
        for bit in range(4):
            if op & (1 << bit):
                offset |= self.byte() << (8 * bit)
        for bit in range(3):
            if op & (0x10 << bit):
                length |= self.byte() << (8 * bit)
        return offset, length or 0x10000
