"""The ulp-gap codec: for each changed element, how far it stepped and how far it is from the last.

After an update with a fine-tuning learning rate few bf16 elements change, and most of those by one
ulp. So the steps are a few small numbers, and the gaps spread like random places do: their low bits
are noise, which goes out as it is, and what stands above is small again.

A block's body, all little-endian; n changes, elements of w bytes:

    u32  n       changes, null changes included
    u8   k       low bits of each gap
    u32  m       steps too large for a nibble
    u32  x 2+w   bytes of each frame that follows; 0: all that it stands for is 0
    k planes     of (n + 7) // 8 bytes: bit 0 of each gap, bit 1, ...; first change in the top bit
    frame        n bytes: gap >> k
    frame        (n + 1) // 2 bytes: two steps each, the first in the high nibble; 15: too large
    w frames     m bytes each: of what such steps are above 15, the lowest byte, the next, ...

A gap counts the unchanged elements since the last change. Where gap >> k would be above 255, null
changes (step 0) stand in between. A step is the difference of the bit patterns, modulo 2^(8w), in
zigzag: 0, -1, 1, -2, ... become 0, 1, 2, 3, ... A frame is one zstd frame.
"""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_sync.codecs.base import Words
from weight_sync.codecs.changes import find_changes
from weight_sync.codecs.frames import Bytes, compress_noise, decompress
from weight_sync.errors import PayloadCorrupt

_HIGH = 256
_LARGE = 15
_MOST_LOW_BITS = 31
# Two bits below the mean gap's own: enough above them that zstd finds their distribution, and few
# enough that its table of it stays small.
_SPARE_BITS = 2

Places = NDArray[np.intp]


class UlpGap:
    """Codes places as gaps and changes as steps. Exact for every bit pattern of every width."""

    id = "ulp-gap"

    def encode(self, base: Words, new: Words, most_changes: int) -> bytes | None:
        """Return a body as the module's docstring describes it; empty: nothing changed."""
        found = find_changes(base, new, most_changes)
        if found is None:
            return None
        places, steps = found
        if not places.size:
            return b""
        low_bits = max(0, (base.size // places.size).bit_length() - 1 - _SPARE_BITS)
        places, steps, gaps = _with_null_changes(places, steps, _HIGH << low_bits)
        low = gaps.astype(np.uint32)
        low_planes = [np.packbits(low & np.uint32(1 << bit) != 0) for bit in range(low_bits)]
        nibbles, large = _split(_zigzag(steps))
        planes = [(gaps >> low_bits).astype(np.uint8), nibbles, *large.T]
        frames = [compress_noise(plane) if plane.any() else b"" for plane in planes]
        head = _head(steps.itemsize).pack(places.size, low_bits, len(large), *map(len, frames))
        return b"".join([head, *(plane.tobytes() for plane in low_planes), *frames])

    def apply(self, body: memoryview, onto: Words) -> None:
        """Step each changed element, in place."""
        head = _head(onto.itemsize)
        if body.nbytes < head.size:
            raise PayloadCorrupt(f"a body of {body.nbytes} bytes is shorter than its head")
        count, low_bits, large_count, *sizes = head.unpack_from(body)
        plane_bytes = (count + 7) // 8
        expected = head.size + low_bits * plane_bytes + sum(sizes)
        fits = 0 < count <= onto.size and large_count <= count and low_bits <= _MOST_LOW_BITS
        if not fits or body.nbytes != expected:
            raise PayloadCorrupt(
                f"a body of {body.nbytes} bytes for {onto.size} elements names {count} changes, "
                f"{large_count} of them large, {low_bits} low bits and frames of {sizes} bytes"
            )
        low = np.zeros(count, np.uint32)
        at = head.size
        for bit in range(low_bits):
            plane = np.frombuffer(body[at : at + plane_bytes], np.uint8)
            low |= np.unpackbits(plane, count=count).astype(np.uint32) << np.uint32(bit)
            at += plane_bytes
        planes = []
        holds = [count, (count + 1) // 2] + [large_count] * onto.itemsize
        for size, plain_bytes in zip(sizes, holds, strict=True):
            frame = body[at : at + size]
            planes.append(
                decompress(frame, plain_bytes) if size else np.zeros(plain_bytes, np.uint8)
            )
            at += size
        places = low.astype(np.intp)
        places += planes[0].astype(np.intp) << low_bits
        places += 1
        np.cumsum(places, out=places)
        places -= 1
        if places[-1] >= onto.size:
            raise PayloadCorrupt(f"a change at element {places[-1]} of {onto.size}")
        onto[places] += _unzigzag(_join(planes[1], planes[2:], count, onto.dtype))


def _head(word_bytes: int) -> struct.Struct:
    return struct.Struct(f"<IBI{2 + word_bytes}I")


def _with_null_changes(
    places: Places, steps: Words, reach: int
) -> tuple[Places, Words, NDArray[np.int64]]:
    """Put null changes where a gap is `reach` or longer; return the gaps with it."""
    gaps = _gaps(places)
    far = np.flatnonzero(gaps >= reach)
    if far.size:
        # One null change for each whole reach: what is left of the gap is shorter.
        extra = gaps[far] // reach
        nth = np.arange(extra.sum()) - np.repeat(np.cumsum(extra) - extra, extra)
        last = places[far] - gaps[far] - 1
        nulls = np.repeat(last, extra) + (nth + 1) * reach
        before = np.repeat(far, extra)
        places = np.insert(places, before, nulls)
        steps = np.insert(steps, before, steps.dtype.type(0))
        gaps = _gaps(places)
    return places, steps, gaps


def _gaps(places: Places) -> NDArray[np.int64]:
    gaps = np.empty(places.size, np.int64)
    gaps[0] = places[0]
    np.subtract(places[1:], places[:-1], out=gaps[1:])
    gaps[1:] -= 1
    return gaps


def _zigzag(steps: Words) -> Words:
    word = steps.dtype.type
    negative = steps >> word(8 * steps.itemsize - 1)
    zigzag: Words = (steps << word(1)) ^ (word(0) - negative)
    return zigzag


def _unzigzag(zigzag: Words) -> Words:
    word = zigzag.dtype.type
    steps: Words = (zigzag >> word(1)) ^ (word(0) - (zigzag & word(1)))
    return steps


def _split(zigzag: Words) -> tuple[Bytes, Bytes]:
    """Return the nibbles, two a byte, and the bytes of what does not fit one, [m, w]."""
    nibbles = np.zeros(zigzag.size + zigzag.size % 2, np.uint8)
    nibbles[: zigzag.size] = np.minimum(zigzag, _LARGE)
    large = zigzag[nibbles[: zigzag.size] == _LARGE] - zigzag.dtype.type(_LARGE)
    pairs: Bytes = nibbles[0::2] << np.uint8(4) | nibbles[1::2]
    return pairs, large.view(np.uint8).reshape(-1, zigzag.itemsize)


def _join(pairs: Bytes, large: list[Bytes], count: int, dtype: Any) -> Words:
    """Undo `_split`."""
    nibbles = np.empty((pairs.size, 2), np.uint8)
    nibbles[:, 0] = pairs >> 4
    nibbles[:, 1] = pairs & _LARGE
    zigzag: Words = nibbles.reshape(-1)[:count].astype(dtype)
    beyond = np.flatnonzero(zigzag == _LARGE)
    if beyond.size != large[0].size:
        raise PayloadCorrupt(f"expected {large[0].size} large steps, found {beyond.size}")
    if beyond.size:
        zigzag[beyond] += np.stack(large, axis=1).view(dtype).reshape(-1)
    return zigzag
