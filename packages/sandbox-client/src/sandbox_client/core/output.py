"""Keeping a bounded part of a command's output: its head, its tail, and a count of the rest."""

__all__ = ["BoundedOutput", "head_budget_bytes", "join_kept", "split_kept"]


def head_budget_bytes(max_bytes: int) -> int:
    """How many of `max_bytes` are kept from the beginning of a stream."""
    return (max_bytes + 1) // 2


class BoundedOutput:
    """Collects a byte stream of any length in at most about `2 * max_bytes` of memory.

    `feed` hands back the part of the head that is new, so a caller can stream it on at once; the
    tail is known only at the end and comes from `finish`.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
        self._head_left = head_budget_bytes(max_bytes)
        self._tail_budget = max_bytes - self._head_left
        self._tail = bytearray()
        self._dropped = 0

    @property
    def omitted_bytes(self) -> int:
        """Bytes that neither the head nor the tail will contain, as of now."""
        return self._dropped + max(0, len(self._tail) - self._tail_budget)

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes of the stream; returns those that belong to the head."""
        head = data[: self._head_left]
        self._head_left -= len(head)
        rest = data[len(head) :]
        if rest:
            self._tail += rest
            # Trimming only now and then keeps this linear in the length of the stream.
            surplus = len(self._tail) - self._tail_budget
            if surplus > self._tail_budget + 4096:
                del self._tail[:surplus]
                self._dropped += surplus
        return head

    def finish(self) -> bytes:
        """Returns the kept tail; what lies between it and the head is `omitted_bytes` long."""
        surplus = max(0, len(self._tail) - self._tail_budget)
        return bytes(self._tail[surplus:])


def split_kept(kept: bytes, omitted_bytes: int, max_bytes: int) -> tuple[bytes, bytes]:
    """Splits kept output into its head and its tail; the tail is empty if nothing was omitted."""
    if omitted_bytes == 0:
        return kept, b""
    cut = head_budget_bytes(max_bytes)
    return kept[:cut], kept[cut:]


def join_kept(kept: bytes, omitted_bytes: int, max_bytes: int) -> str:
    """Kept output as text: invalid UTF-8 replaced, with a line that counts the omitted bytes."""
    head, tail = split_kept(kept, omitted_bytes, max_bytes)
    if omitted_bytes == 0:
        return head.decode("utf-8", "replace")
    # Each side is decoded by itself: a character cut in half shows as a replacement.
    return (
        f"{head.decode('utf-8', 'replace')}\n[{omitted_bytes} bytes omitted]\n"
        f"{tail.decode('utf-8', 'replace')}"
    )
