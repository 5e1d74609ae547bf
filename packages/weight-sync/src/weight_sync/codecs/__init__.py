"""How the tensors of a version become payload bytes, and back. Pure: no files."""

from collections.abc import Mapping
from typing import TypeVar

from weight_sync.codecs.base import Coder, Tensor
from weight_sync.codecs.delta import DENSE_ABOVE, Delta
from weight_sync.codecs.dense import Dense
from weight_sync.codecs.overwrite import Overwrite
from weight_sync.codecs.ulp_gap import UlpGap
from weight_sync.codecs.xor import Xor
from weight_sync.errors import UnknownCodec

__all__ = [
    "ANCHOR_CODECS",
    "CODERS",
    "DENSE_ABOVE",
    "Coder",
    "Delta",
    "Dense",
    "Tensor",
    "anchor_codec",
    "delta_codec",
]

ANCHOR_CODECS: Mapping[str, Dense] = {Dense.id: Dense()}
"""Every codec of anchors that this release reads, by the id in manifests."""

CODERS: Mapping[str, Coder] = {UlpGap.id: UlpGap(), Xor.id: Xor(), Overwrite.id: Overwrite()}
"""Every codec of deltas that this release reads, by the id in manifests."""

C = TypeVar("C")


def anchor_codec(codec_id: str) -> Dense:
    """Return the codec of an anchor.

    Raises:
        UnknownCodec: this release has none of that name.
    """
    return _known("an anchor", ANCHOR_CODECS, codec_id)


def delta_codec(codec_id: str, *, dense_above: float = DENSE_ABOVE) -> Delta:
    """Return the codec of a delta.

    Args:
        codec_id: its name in manifests.
        dense_above: share of changed elements above which a block is sent whole; for encoding.

    Raises:
        UnknownCodec: this release has none of that name.
    """
    return Delta(_known("a delta", CODERS, codec_id), dense_above=dense_above)


def _known(what: str, codecs: Mapping[str, C], codec_id: str) -> C:
    codec = codecs.get(codec_id)
    if codec is None:
        raise UnknownCodec(
            f"the manifest of {what} names codec {codec_id!r}; this release reads "
            f"{sorted(codecs)}. Update this receiver, or publish with one of these"
        )
    return codec
