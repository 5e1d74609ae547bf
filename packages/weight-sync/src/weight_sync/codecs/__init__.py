"""How the tensors of a version become payload bytes, and back. Pure: no files."""

from collections.abc import Mapping

from weight_sync.codecs.base import Codec, Tensor
from weight_sync.codecs.dense import Dense
from weight_sync.errors import UnknownCodec

__all__ = ["CODECS", "Codec", "Dense", "Tensor", "codec_by_id"]

CODECS: Mapping[str, Codec] = {Dense.id: Dense()}
"""Every codec this release reads, by the id in manifests."""


def codec_by_id(codec_id: str) -> Codec:
    """Return a codec.

    Raises:
        UnknownCodec: this release has none of that name.
    """
    codec = CODECS.get(codec_id)
    if codec is None:
        raise UnknownCodec(
            f"the manifest names codec {codec_id!r}; this release reads {sorted(CODECS)}. "
            "Update this receiver, or publish with one of these"
        )
    return codec
