"""The overwrite codec: places and new values. Larger than the others, but it can be applied twice.

A block's body, little-endian; n changes, elements of w bytes:

    u32    n
    frame  zstd: n places of 4 bytes, from the block's start and ascending; then n words of w bytes
"""

import struct

import numpy as np

from weight_sync.codecs.base import Words
from weight_sync.codecs.changes import find_changes
from weight_sync.codecs.frames import compress, decompress
from weight_sync.errors import PayloadCorrupt

_HEAD = struct.Struct("<I")
_PLACE = np.dtype("<u4")


class Overwrite:
    """Codes changed elements as place and value; applying it again changes nothing."""

    id = "overwrite"

    def encode(self, base: Words, new: Words, most_changes: int) -> bytes | None:
        """Return a body as the module's docstring describes it; empty: nothing changed."""
        found = find_changes(base, new, most_changes)
        if found is None:
            return None
        places, _ = found
        if not places.size:
            return b""
        parts = places.astype(_PLACE).tobytes() + new[places].tobytes()
        return _HEAD.pack(places.size) + compress(parts)

    def apply(self, body: memoryview, onto: Words) -> None:
        """Write the new values, in place."""
        if body.nbytes < _HEAD.size:
            raise PayloadCorrupt(f"a body of {body.nbytes} bytes is shorter than its head")
        (count,) = _HEAD.unpack_from(body)
        if not 0 < count <= onto.size:
            raise PayloadCorrupt(f"{count} changes in {onto.size} elements")
        parts = decompress(body[_HEAD.size :], count * (_PLACE.itemsize + onto.itemsize))
        split = count * _PLACE.itemsize
        places = parts[:split].view(_PLACE)
        if int(places.max()) >= onto.size:
            raise PayloadCorrupt(f"a change at element {places.max()} of {onto.size}")
        onto[places] = parts[split:].view(onto.dtype)
