"""What others send between two versions, each in the form that is best for it here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import zstandard
from bench.weights.bf16 import Bits
from weight_sync.codecs import Tensor, delta_codec

PIECE = 4 << 20
"""Elements handled at a time: what fits the cache is faster for everybody."""

Model = Mapping[str, Tensor]


Sent = Sequence[bytes]


@dataclass(frozen=True)
class Way:
    """A way to send what changed."""

    name: str
    encode: Callable[[Model, Model], Sent]
    """From the base and the new version to what goes over the wire."""
    decode: Callable[[Sent, Model, Model], None]
    """From that and the base to the new version, written into the last."""


def ours(codec_id: str) -> Way:
    """A codec of weight-sync, file and all. No block goes out whole: the codec is measured."""
    codec = delta_codec(codec_id, dense_above=1.0)

    def encode(base: Model, new: Model) -> Sent:
        return [b"".join(codec.encode(list(new.values()), list(base.values())))]

    def decode(sent: Sent, base: Model, out: Model) -> None:
        for name, tensor in base.items():
            np.copyto(out[name].words(), tensor.words())
        codec.apply(memoryview(sent[0]), out)

    return Way(codec_id, encode, decode)


def _encode_xor(base: Model, new: Model) -> Sent:
    compressor = zstandard.ZstdCompressor(level=1)
    return [compressor.compress((old ^ now).data) for old, now in _pieces(base, new)]


def _decode_xor(sent: Sent, base: Model, out: Model) -> None:
    decompressor = zstandard.ZstdDecompressor()
    for frame, (old, target) in zip(sent, _pieces(base, out), strict=True):
        np.bitwise_xor(old, np.frombuffer(decompressor.decompress(frame), np.uint16), target)


def _encode_overwrite(base: Model, new: Model) -> Sent:
    compressor = zstandard.ZstdCompressor(level=1)
    return [compressor.compress(_index_value(old, now)) for old, now in _pieces(base, new)]


def _decode_overwrite(sent: Sent, base: Model, out: Model) -> None:
    decompressor = zstandard.ZstdDecompressor()
    for frame, (old, target) in zip(sent, _pieces(base, out), strict=True):
        _put(decompressor.decompress(frame), old, target)


def _encode_index_value(base: Model, new: Model) -> Sent:
    return [_index_value(old, now) for old, now in _pieces(base, new)]


def _decode_index_value(sent: Sent, base: Model, out: Model) -> None:
    for data, (old, target) in zip(sent, _pieces(base, out), strict=True):
        _put(data, old, target)


XOR = Way("xor+zstd-1", _encode_xor, _decode_xor)
"""Old bits XOR new bits, zstd level 1: slime, Miles, SkyRL, NeMo-RL."""
OVERWRITE = Way("overwrite+zstd-1", _encode_overwrite, _decode_overwrite)
"""u32 places and new values, zstd level 1: an option of slime, Miles and NeMo-RL."""
INDEX_VALUE = Way("index+value", _encode_index_value, _decode_index_value)
"""i32 places and new values as they are: verl, TRL, vime."""


def _index_value(old: Bits, now: Bits) -> bytes:
    places = np.flatnonzero(old != now)
    return places.astype(np.uint32).tobytes() + now[places].tobytes()


def _put(data: bytes, old: Bits, target: Bits) -> None:
    count = len(data) // 6
    np.copyto(target, old)
    places = np.frombuffer(data, np.uint32, count)
    target[places] = np.frombuffer(data, np.uint16, count, offset=4 * count)


def _pieces(one: Model, other: Model) -> list[tuple[Bits, Bits]]:
    pairs = [(tensor.words(), other[name].words()) for name, tensor in one.items()]
    return [
        (left[at : at + PIECE], right[at : at + PIECE])
        for left, right in pairs
        for at in range(0, left.size, PIECE)
    ]


def model_of(arrays: Mapping[str, Bits]) -> dict[str, Tensor]:
    """Return arrays of bits as tensors, with no copy of them."""
    return {
        name: Tensor(name, "BF16", (bits.size,), bits.view(np.uint8).data)
        for name, bits in arrays.items()
    }
