import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from weight_sync.tensors import RawTensor, TensorLike, raw_tensor

Array = np.ndarray[Any, Any]


def test_plain_arrays_keep_dtype_shape_and_bytes() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = raw_tensor("w", array)
    assert (tensor.dtype, tensor.shape) == ("F32", (2, 3))
    assert bytes(tensor.data) == array.tobytes()


def test_contiguous_arrays_are_not_copied() -> None:
    array = np.zeros(4, np.float32)
    tensor = raw_tensor("w", array)
    array[0] = 1
    assert bytes(tensor.data) == array.tobytes()


def test_a_transposed_array_is_written_in_its_own_order() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3).T
    tensor = raw_tensor("w", array)
    assert tensor.shape == (3, 2)
    assert bytes(tensor.data) == np.array([0, 3, 1, 4, 2, 5], np.int32).tobytes()


@pytest.mark.parametrize("array", [np.float32(2.5).reshape(()), np.zeros((0, 3), np.float32)])
def test_scalars_and_empty_tensors_are_tensors_too(array: Array) -> None:
    tensor = raw_tensor("w", array)
    assert tensor.shape == array.shape
    assert bytes(tensor.data) == array.tobytes()


@pytest.mark.parametrize(
    "bits", [np.array([[1, 2], [3, 4]], np.uint16), np.array([[1, 2], [3, 4]], np.int16)]
)
def test_bf16_comes_as_labelled_bits(bits: Array) -> None:
    tensor = raw_tensor("w", RawTensor(bits, "BF16"))
    assert (tensor.dtype, tensor.shape) == ("BF16", (2, 2))
    assert bytes(tensor.data) == b"\x01\0\x02\0\x03\0\x04\0"


def test_bytes_need_a_shape() -> None:
    assert raw_tensor("w", RawTensor(b"\0" * 8, "BF16", (4,))).shape == (4,)
    with pytest.raises(ValueError, match="no shape of their own"):
        raw_tensor("w", RawTensor(b"\0" * 8, "BF16"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(2, np.uint16), r"RawTensor\(array, 'BF16'\)"),
        (np.zeros(2, np.complex64), "cannot tell what complex64 means"),
        (np.zeros(2, ">f4"), "little-endian"),
        (RawTensor(np.zeros(2, np.uint16), "bf16"), "found 'bf16'"),
        (RawTensor(np.zeros(3, np.uint8), "BF16"), r"shape \[3\] is 6 bytes, found 3"),
        (RawTensor(b"\0" * 7, "F32", (2,)), r"shape \[2\] is 8 bytes, found 7"),
    ],
)
def test_says_what_is_wrong_with_a_tensor(value: TensorLike, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        raw_tensor("w", value)


def test_importing_the_package_or_its_server_imports_no_torch() -> None:
    code = (
        "import sys, weight_sync, weight_sync.app, weight_sync.testing;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
