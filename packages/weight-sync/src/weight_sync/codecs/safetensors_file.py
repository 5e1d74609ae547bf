"""The safetensors file layout: header in, header out, no copies of the data.

The format is 8 bytes of little-endian header length, a JSON header (name -> dtype, shape, offsets
into what follows), then the tensors back to back. `safetensors` itself would copy every tensor into
one bytes object first; a payload is written straight from the trainer's memory instead.
"""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from weight_sync.codecs.base import Tensor
from weight_sync.core.manifest import DTYPE_BYTES
from weight_sync.errors import PayloadCorrupt

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000


def header(tensors: Sequence[Tensor]) -> bytes:
    """Return length and JSON header of a file that holds the tensors in this order."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.data.nbytes
        table[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    # Blanks up to a multiple of 8, so that the data stays aligned when the file is mapped.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def in_file_order(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Sort so that each tensor starts at a multiple of its element's size: wide dtypes first."""
    return sorted(tensors, key=lambda tensor: (-DTYPE_BYTES[tensor.dtype], tensor.name))


def tensors(file: memoryview) -> Iterator[Tensor]:
    """Yield the tensors of a file, as views into it.

    Raises:
        PayloadCorrupt: the header is not one, or does not fit the file.
    """
    table, start = _table(file)
    body = file[start:]
    covered = 0
    for name, entry in table.items():
        if name == "__metadata__":
            continue
        tensor, begin = _tensor(name, entry, body)
        if begin != covered:
            raise PayloadCorrupt(
                f"tensor {name}: expected to start at byte {covered} of the data, found {begin}"
            )
        covered += tensor.data.nbytes
        yield tensor
    if covered != body.nbytes:
        raise PayloadCorrupt(f"expected {covered} bytes of tensors, found {body.nbytes}")


def _table(file: memoryview) -> tuple[dict[str, object], int]:
    length = int.from_bytes(file[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + length
    if length > min(_MAX_HEADER_BYTES, file.nbytes - _LENGTH_BYTES):
        raise PayloadCorrupt(f"a header of {length} bytes does not fit a file of {file.nbytes}")
    try:
        table = json.loads(bytes(file[_LENGTH_BYTES:start]))
    except ValueError as error:
        raise PayloadCorrupt(f"the safetensors header is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise PayloadCorrupt(f"the safetensors header is a {type(table).__name__}, not an object")
    return table, start


def _tensor(name: str, entry: Any, body: memoryview) -> tuple[Tensor, int]:
    try:
        dtype = str(entry["dtype"])
        shape = tuple(int(size) for size in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
        expected = math.prod(shape) * DTYPE_BYTES[dtype]
    except (KeyError, TypeError, ValueError) as error:
        raise PayloadCorrupt(f"tensor {name}: bad header entry: {error!r}") from error
    if end - begin != expected or not 0 <= begin <= end <= body.nbytes:
        raise PayloadCorrupt(
            f"tensor {name}: expected {expected} bytes inside {body.nbytes}, found {begin}..{end}"
        )
    return Tensor(name, dtype, shape, body[begin:end]), begin
