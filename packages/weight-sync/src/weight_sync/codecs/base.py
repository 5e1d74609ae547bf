"""What a codec is, and the tensors it works on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from weight_sync.core.manifest import TensorEntry, digest
from weight_sync.errors import ChecksumMismatch


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


class Codec(Protocol):
    """Turns tensors into the bytes of one payload file and back, tensor by tensor.

    Both directions stream: neither needs more memory than its inputs and one tensor.
    """

    id: str
    """The codec's name in manifests; a change of the format is a new id."""
    needs_base: bool
    """Whether it codes against an older version. One that does not makes anchors."""
    payload_is_model: bool
    """Whether the payload file is itself a model file that engines load."""

    def encode(
        self, tensors: Sequence[Tensor], base: Sequence[Tensor] | None
    ) -> Iterator[bytes | memoryview]:
        """Yield the payload file's bytes, piece by piece, in order.

        Args:
            tensors: the new version.
            base: the same names, dtypes and shapes of the base; None for an anchor.
        """
        ...

    def decode(self, payload: memoryview, base: Sequence[Tensor] | None) -> Iterator[Tensor]:
        """Yield the tensors of the new version that the payload holds.

        Raises:
            PayloadCorrupt: the payload's structure makes no sense.
        """
        ...
