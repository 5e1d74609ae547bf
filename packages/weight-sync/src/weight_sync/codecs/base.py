"""What a codec is, and the tensors it works on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from weight_sync.core.manifest import DTYPE_BYTES, TensorEntry, digest
from weight_sync.errors import ChecksumMismatch

Words = NDArray[np.unsignedinteger[Any]]
"""The bit patterns of a tensor's elements, flat: uint8, uint16, uint32 or uint64."""
Piece = bytes | memoryview

_WORDS: Mapping[int, str] = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's raw bytes and what they mean."""

    name: str
    dtype: str
    """safetensors' name: `BF16`, `F32`, ..."""
    shape: tuple[int, ...]
    data: memoryview
    """The C-contiguous little-endian bytes, flat."""

    def entry(self) -> TensorEntry:
        """Return the tensor's line in a manifest; hashes its bytes."""
        return TensorEntry(self.name, self.dtype, self.shape, digest(self.data))

    def words(self) -> Words:
        """Return the elements' bit patterns, as a view; writable if the tensor's memory is."""
        return np.frombuffer(self.data, _WORDS[DTYPE_BYTES[self.dtype]])

    def verify(self, entry: TensorEntry) -> None:
        """Compare with a line of a manifest.

        Raises:
            ChecksumMismatch: dtype, shape or bytes differ.
        """
        found = self.entry()
        if found != entry:
            raise ChecksumMismatch(
                f"tensor {entry.name}: expected {entry.dtype} {list(entry.shape)} with checksum "
                f"{entry.checksum}, found {found.dtype} {list(found.shape)} with {found.checksum}. "
                "Fetch the payload again; if it stays, publish the version again"
            )


class Coder(Protocol):
    """What tells one delta codec from another: how the changes of one array are written down.

    Pure functions of arrays, for bit patterns of any width; called from several threads at once.
    """

    @property
    def id(self) -> str:
        """The codec's name in manifests."""
        ...

    def encode(self, base: Words, new: Words, most_changes: int) -> bytes | None:
        """Return what changed; empty: nothing did.

        Args:
            base: at most 2^32 words.
            new: as many, of the same width.
            most_changes: return None if more words than this differ.
        """
        ...

    def apply(self, body: memoryview, onto: Words) -> None:
        """Change the base's words into the new ones, in place.

        Raises:
            PayloadCorrupt: `body` is not what `encode` returns for as many words of that width.
        """
        ...
