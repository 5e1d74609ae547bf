"""zstd frames whose size is known before they are opened."""

import numpy as np
import zstandard
from numpy.typing import NDArray

from weight_sync.errors import PayloadCorrupt

Bytes = NDArray[np.uint8]

_LEVEL = 1
# Level 1 with the smallest table: matches, which noise has by chance alone, are hardly looked for,
# and bytes are coded by how often they come. For small numbers in random order that is smaller.
_NOISE = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, chain_log=6, min_match=7
)


def compress(data: "NDArray[np.generic] | bytes") -> bytes:
    """Return a frame that holds an array's bytes, in its order, and their number."""
    view = np.ascontiguousarray(data).data if isinstance(data, np.ndarray) else data
    return zstandard.ZstdCompressor(level=_LEVEL).compress(view)


def compress_noise(data: Bytes) -> bytes:
    """Return a frame like `compress`, for bytes that are small numbers in random order."""
    view = np.ascontiguousarray(data).data
    return zstandard.ZstdCompressor(compression_params=_NOISE).compress(view)


def decompress(frame: memoryview, size_bytes: int) -> Bytes:
    """Open a frame that must hold `size_bytes`.

    Raises:
        PayloadCorrupt: it is not a frame, or of another size. Its own word on its size is checked
            first: a damaged one must not make us take all memory.
    """
    try:
        found = zstandard.frame_content_size(frame)
        if found != size_bytes:
            raise PayloadCorrupt(f"expected a zstd frame of {size_bytes} bytes, found {found}")
        data = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PayloadCorrupt(f"a zstd frame cannot be read: {error}") from error
    if len(data) != size_bytes:
        raise PayloadCorrupt(f"expected {size_bytes} bytes in a zstd frame, found {len(data)}")
    return np.frombuffer(data, np.uint8)
