"""The dense codec: every tensor as it is, in one safetensors file that engines load unchanged."""

from collections.abc import Iterator, Sequence

from weight_sync.codecs import safetensors_file
from weight_sync.codecs.base import Piece, Tensor


class Dense:
    """Whole tensors. Makes anchors; decoding yields views into the payload, no copies."""

    id = "dense"
    payload_name = "model.safetensors"

    def encode(self, tensors: Sequence[Tensor]) -> Iterator[Piece]:
        """Yield a safetensors header, then each tensor's own memory."""
        ordered = safetensors_file.in_file_order(tensors)
        yield safetensors_file.header(ordered)
        for tensor in ordered:
            yield tensor.data

    def decode(self, payload: memoryview) -> Iterator[Tensor]:
        """Yield views into the payload."""
        return safetensors_file.tensors(payload)
