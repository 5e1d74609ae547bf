import json
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from weight_sync.codecs import Dense, Tensor, safetensors_file
from weight_sync.core.manifest import DTYPE_BYTES
from weight_sync.errors import ChecksumMismatch, PayloadCorrupt


@st.composite
def models(draw: st.DrawFn) -> list[Tensor]:
    one = st.text(min_size=1, max_size=12).filter(
        lambda name: name.isprintable() and name != "__metadata__"
    )
    names = draw(st.lists(one, max_size=5, unique=True))
    made = []
    for name in names:
        dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        size = int(np.prod(shape, dtype=int)) * DTYPE_BYTES[dtype]
        bits = draw(st.binary(min_size=size, max_size=size))
        made.append(Tensor(name, dtype, shape, memoryview(bits)))
    return made


def encoded(tensors: list[Tensor]) -> bytes:
    return b"".join(Dense().encode(tensors))


@given(models())
def test_decodes_to_the_same_bits(model: list[Tensor]) -> None:
    decoded = list(Dense().decode(memoryview(encoded(model))))
    assert sorted(t.entry().name for t in decoded) == sorted(t.name for t in model)
    by_name = {t.name: t for t in decoded}
    for tensor in model:
        by_name[tensor.name].verify(tensor.entry())


def test_the_payload_is_what_the_safetensors_library_reads() -> None:
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.array([1, 2, 3], np.int8),
        "c": np.array(2.5, np.float64),
    }
    model = [
        Tensor("b", "F32", (2, 3), arrays["b"].reshape(-1).view(np.uint8).data),
        Tensor("a", "I8", (3,), arrays["a"].view(np.uint8).data),
        Tensor("c", "F64", (), arrays["c"].reshape(-1).view(np.uint8).data),
    ]
    data = encoded(model)
    loaded = safetensors.numpy.load(data)
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
    # Data starts at a multiple of 8, and wide dtypes come first.
    assert int.from_bytes(data[:8], "little") % 8 == 0
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["c"]["data_offsets"][0] == 0
    assert header["__metadata__"] == {"format": "pt"}


def test_encoding_and_decoding_copy_no_tensor() -> None:
    bits = bytearray(b"\x01\x02\x03\x04")
    pieces = list(Dense().encode([Tensor("a", "U8", (4,), memoryview(bits))]))
    bits[0] = 9
    payload = bytearray(b"".join(pieces))
    assert payload.endswith(b"\x09\x02\x03\x04")
    (tensor,) = Dense().decode(memoryview(payload))
    payload[-1] = 7
    assert bytes(tensor.data) == b"\x09\x02\x03\x07"


def test_a_flipped_bit_anywhere_in_the_data_is_noticed() -> None:
    tensor = Tensor("a", "U8", (32,), memoryview(bytes(range(32))))
    payload = encoded([tensor])
    for bit in range(32 * 8):
        flipped = bytearray(payload)
        flipped[len(payload) - 32 + bit // 8] ^= 1 << (bit % 8)
        (found,) = Dense().decode(memoryview(flipped))
        with pytest.raises(ChecksumMismatch, match="tensor a: expected U8"):
            found.verify(tensor.entry())


def test_every_truncation_is_refused() -> None:
    payload = encoded([Tensor("a", "U8", (32,), memoryview(bytes(32)))])
    for length in range(len(payload)):
        with pytest.raises(PayloadCorrupt):
            list(safetensors_file.tensors(memoryview(payload[:length])))


@given(st.binary(max_size=80))
def test_noise_is_refused_and_nothing_worse(noise: bytes) -> None:
    with suppress(PayloadCorrupt):
        list(safetensors_file.tensors(memoryview(noise)))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]},
        {"dtype": "F32"},
        "F32",
    ],
)
def test_a_header_that_does_not_fit_its_data_is_refused(entry: object) -> None:
    text = json.dumps({"a": entry}).encode()
    file = len(text).to_bytes(8, "little") + text + bytes(8)
    with pytest.raises(PayloadCorrupt):
        list(safetensors_file.tensors(memoryview(file)))
