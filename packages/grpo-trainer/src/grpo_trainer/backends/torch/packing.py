"""Sequences side by side, without padding anywhere but inside attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Several sequences as one run of tokens; they do not see each other.

    Attributes:
        token_ids: int64 [tokens].
        positions: int64 [tokens], from 0 in each sequence.
        slots: int64 [tokens], where each token is in the padded grid [rows x width].
        rows: How many sequences there are.
        width: Tokens of the longest one.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: int
    width: int

    @property
    def full(self) -> bool:
        """Whether all sequences are of one length, so that the grid has no padding."""
        return len(self.token_ids) == self.rows * self.width


def pack(sequences: Sequence[NDArray[np.int32]], device: torch.device) -> Packed:
    """Lay sequences end to end, in order."""
    lengths = [len(sequence) for sequence in sequences]
    width = max(lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return Packed(
        token_ids=torch.from_numpy(np.concatenate(sequences).astype(np.int64)).to(device),
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(rows * width + positions).to(device),
        rows=len(lengths),
        width=width,
    )


def causal_attention(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    """Attend within each sequence, to the past and the token itself.

    Sequences are laid out as rows padded on the right. A real token looks only to its left, where
    there is no padding, so no mask is needed and padding costs time alone.

    Args:
        query: float [tokens, heads, width].
        key: float [tokens, key-value heads, width].
        value: float [tokens, key-value heads, width].
        packed: The layout.

    Returns:
        float [tokens, heads * width].
    """
    _, heads, width = query.shape
    mixed = functional.scaled_dot_product_attention(
        _grid(query, packed),
        _grid(key, packed),
        _grid(value, packed),
        is_causal=True,
        enable_gqa=heads != key.shape[1],
    )
    flat = mixed.transpose(1, 2).reshape(packed.rows * packed.width, heads * width)
    return flat if packed.full else flat.index_select(0, packed.slots)


def _grid(x: Tensor, packed: Packed) -> Tensor:
    _, heads, width = x.shape
    flat = x.reshape(-1, heads * width)
    if not packed.full:
        empty = flat.new_zeros(packed.rows * packed.width, heads * width)
        flat = empty.index_copy(0, packed.slots, flat)
    return flat.view(packed.rows, packed.width, heads, width).transpose(1, 2)
