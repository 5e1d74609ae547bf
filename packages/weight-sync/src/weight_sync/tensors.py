"""Tensors as a trainer hands them in: arrays, or raw bits with a label."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weight_sync.codecs import Tensor
from weight_sync.core.manifest import DTYPE_BYTES

_DTYPE_OF_NUMPY: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor given by its bits, for dtypes that numpy has not."""

    bits: "NDArray[np.generic] | bytes | bytearray | memoryview"
    """C-contiguous, little-endian; for BF16 usually a uint16 array."""
    dtype: str
    """safetensors' name: `BF16`, `F8_E4M3`, `F32`, ..."""
    shape: tuple[int, ...] | None = None
    """None: that of `bits`, which then is an array with one element for each of the tensor's."""


TensorLike = NDArray[np.generic] | RawTensor


def raw_tensor(name: str, value: TensorLike) -> Tensor:
    """Return a tensor's bytes without copying them, if they are contiguous.

    Raises:
        ValueError: it is not what its label says.
    """
    if isinstance(value, RawTensor):
        return _labelled(name, value)
    dtype = _DTYPE_OF_NUMPY.get(value.dtype.name)
    if dtype is None or value.dtype.byteorder == ">":
        raise ValueError(
            f"tensor {name}: cannot tell what {value.dtype} means; expected one of "
            f"{sorted(_DTYPE_OF_NUMPY)} in little-endian order, or RawTensor(bits, dtype). "
            "For bf16 bits: RawTensor(array, 'BF16')"
        )
    return Tensor(name, dtype, value.shape, _bytes(value))


def _labelled(name: str, raw: RawTensor) -> Tensor:
    if raw.dtype not in DTYPE_BYTES:
        raise ValueError(
            f"tensor {name}: expected a dtype of {sorted(DTYPE_BYTES)}, found {raw.dtype!r}"
        )
    shape = raw.shape
    if isinstance(raw.bits, np.ndarray):
        data = _bytes(raw.bits)
        shape = raw.bits.shape if shape is None else shape
    else:
        data = memoryview(raw.bits).cast("B")
    if shape is None:
        raise ValueError(f"tensor {name}: bytes have no shape of their own; give one")
    expected = int(np.prod(shape, dtype=np.int64)) * DTYPE_BYTES[raw.dtype]
    if data.nbytes != expected:
        raise ValueError(
            f"tensor {name}: {raw.dtype} of shape {list(shape)} is {expected} bytes, found "
            f"{data.nbytes}"
        )
    return Tensor(name, raw.dtype, tuple(shape), data)


def _bytes(array: NDArray[np.generic]) -> memoryview:
    """Return an array's memory as flat bytes; copies only what is not contiguous."""
    if array.nbytes == 0:
        return memoryview(b"")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
