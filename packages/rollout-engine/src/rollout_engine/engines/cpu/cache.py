"""The KV cache: preallocated rows for running sequences, and slots for tokens that are kept."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_engine.engines.cpu.spec import ModelSpec

Floats = NDArray[np.floating[Any]]
"""Of the dtype that the engine computes in."""

LENGTH_STEP = 16
"""Attention works on multiples of this many positions, so that views can be kept and used again."""


def bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token takes."""
    return spec.layers * 2 * spec.kv_heads * spec.head_dim * dtype.itemsize


def round_up(positions: int) -> int:
    """Round up to a multiple of `LENGTH_STEP`."""
    return -(-positions // LENGTH_STEP) * LENGTH_STEP


class KvCache:
    """Keys and values.

    Those of running sequences are `[layers, 2, rows, kv_heads, positions, head_dim]`, those of kept
    tokens `[slots, layers, 2, kv_heads, head_dim]`.

    The memory is claimed from the system as rows fill up, not at once.

    Attributes:
        dtype: Of keys, values and mask.
        array_dtype: The same, for numpy.
        layers: For each layer its part as `[2 * rows * kv_heads * positions, head_dim]`; writing
            single tokens is twice as fast through numpy.
        index: `[rows, kv_heads, 2]`, where position 0 of a row's keys and of its values lies in it.
        mask: `[rows * kv_heads, 1, positions]`, 0 at positions in use and -inf elsewhere.
    """

    def __init__(
        self, spec: ModelSpec, rows: int, positions: int, slots: int, dtype: torch.dtype
    ) -> None:
        self.dtype = dtype
        self.array_dtype: np.dtype[Any] = torch.empty(0, dtype=dtype).numpy().dtype
        self.rows = rows
        self._spare = rows  # one more, for moving others in circles
        rows += 1
        self.positions = round_up(positions)
        self._kv_heads = spec.kv_heads
        shape = (spec.layers, 2, rows, spec.kv_heads, self.positions, spec.head_dim)
        # numpy's zeros are untouched pages; torch's would be written at once.
        self._array = np.zeros(shape, self.array_dtype)
        self._memory = torch.from_numpy(self._array)
        self._by_layer = [(layer[0], layer[1]) for layer in self._memory]
        kept = (slots, spec.layers, 2, spec.kv_heads, spec.head_dim)
        self._kept = torch.from_numpy(np.zeros(kept, self.array_dtype))
        self.layers = [layer.reshape(-1, spec.head_dim) for layer in self._array]
        planes = np.arange(2)[None, None, :] * (rows * spec.kv_heads)
        heads = np.arange(rows * spec.kv_heads).reshape(rows, spec.kv_heads, 1)
        self.index: NDArray[np.int64] = (planes + heads) * self.positions
        mask = (rows * spec.kv_heads, 1, self.positions)
        self.mask = torch.full(mask, -torch.inf, dtype=dtype)
        self._arange = np.arange(rows)
        self._mask_by_row = self.mask.view(rows, spec.kv_heads, self.positions).numpy()

    def views(self, layer: int, first: int, end: int, length: int) -> tuple[Floats, Tensor]:
        """Return the keys and values of some rows at the first positions.

        Shapes: `[rows, kv_heads, head_dim, length]` and `[rows * kv_heads, length, head_dim]`.
        """
        keys = self._array[layer, 0, first:end, :, :length].swapaxes(-1, -2)
        values = self._by_layer[layer][1].flatten(0, 1)
        return keys, values[first * self._kv_heads : end * self._kv_heads, :length]

    def rows_view(self, layer: int, first: int, end: int, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of some rows, both `[rows, kv_heads, length, head_dim]`."""
        keys, values = self._by_layer[layer]
        return keys[first:end, :, :length], values[first:end, :, :length]

    def use(self, positions: NDArray[np.int64]) -> None:
        """Unmask one position in each of the first rows."""
        self._mask_by_row[self._arange[: len(positions)], :, positions] = 0.0

    def use_range(self, row: int, length: int) -> None:
        """Unmask exactly the first positions of a row."""
        self._mask_by_row[row, :, :length] = 0.0
        self._mask_by_row[row, :, length:] = -np.inf

    def save(self, row: int, start: int, slots: list[int]) -> None:
        """Copy a row's positions from `start` on into slots."""
        part = self._memory[:, :, row, :, start : start + len(slots)]
        self._kept.index_copy_(0, torch.tensor(slots), part.permute(3, 0, 1, 2, 4))

    def restore(self, row: int, slots: list[int]) -> None:
        """Copy slots into a row's first positions."""
        part = self._kept.index_select(0, torch.tensor(slots))
        self._memory[:, :, row, :, : len(slots)].copy_(part.permute(1, 2, 3, 0, 4))

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of a row, and its mask, to another row."""
        self._memory[:, :, target, :, :length].copy_(self._memory[:, :, source, :, :length])
        self._mask_by_row[target] = self._mask_by_row[source]

    def rotate(self, cycle: list[int], lengths: NDArray[np.int64]) -> None:
        """Give each row of a cycle the content of the next one; `lengths` are those before."""
        self.move(cycle[0], self._spare, int(lengths[cycle[0]]))
        for target, source in itertools.pairwise(cycle):
            self.move(source, target, int(lengths[source]))
        self.move(self._spare, cycle[-1], int(lengths[cycle[0]]))

    def scrub(self, row: int) -> None:
        """Zero a row."""
        self._memory[:, :, row].zero_()

    def scrub_all(self) -> None:
        """Zero every row."""
        self._memory.zero_()


__all__ = ["LENGTH_STEP", "Floats", "KvCache", "bytes_per_token", "round_up"]
