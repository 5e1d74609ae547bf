"""The XOR codec: what is common elsewhere. Old bits XOR new bits, as one zstd frame a block."""

import numpy as np

from weight_sync.codecs.base import Words
from weight_sync.codecs.frames import compress, decompress


class Xor:
    """Codes a block as the XOR of its words, unchanged ones as zeros. Exact for all patterns."""

    id = "xor"

    def encode(self, base: Words, new: Words, most_changes: int) -> bytes | None:
        """Return one zstd frame of as many bytes as the words have; empty: nothing changed."""
        bits = base ^ new
        changes = int(np.count_nonzero(bits))
        if changes > most_changes:
            return None
        return compress(bits) if changes else b""

    def apply(self, body: memoryview, onto: Words) -> None:
        """XOR the words, in place."""
        onto ^= decompress(body, onto.nbytes).view(onto.dtype)
