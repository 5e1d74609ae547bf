"""Keeping decoding rows in an order, and cut into segments, that waste little on padding."""

from __future__ import annotations

import torch

from rollout_engine.engines.cpu.batch import Batch
from rollout_engine.engines.cpu.cache import KvCache, bytes_per_token, round_up
from rollout_engine.engines.cpu.rows import Rows
from rollout_engine.engines.cpu.segments import Segment, arrange, cut, cycles
from rollout_engine.engines.cpu.spec import ModelSpec

_ORDER_STEPS = 32
"""Rows may be reordered every so many steps."""

_MOVE_COST = 4
"""Moving a position of a row costs so many times what attending to it costs."""

_CALL_BYTES = 160_000
"""Keys and values of a layer that are read in the time of one more call: 8 us at 20 GB/s."""


def call_cost_of(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return what one more attention call costs, in positions of one row."""
    return max(1, _CALL_BYTES * spec.layers // bytes_per_token(spec, dtype))


class RowOrder:
    """The segments of the decoding rows.

    Args:
        cache: Rows are moved in all three of these together.
        rows: See `cache`.
        batch: See `cache`.
        call_cost: See `segments`.
    """

    def __init__(self, cache: KvCache, rows: Rows, batch: Batch, call_cost: int) -> None:
        self._cache = cache
        self._rows = rows
        self._batch = batch
        self.call_cost = call_cost
        self.reorders = 0
        self._segments: list[Segment] | None = None

    def changed(self) -> None:
        """Say that a sequence came or went, or a row moved."""
        self._segments = None

    def segments(self, step: int) -> list[Segment]:
        """Return the segments for a step, after reordering the rows if that pays."""
        ask = step % _ORDER_STEPS == 0
        if self._segments is None or ask:
            self._segments = self._found(ask)
        return self._segments

    def _found(self, ask: bool) -> list[Segment]:
        count = self._batch.decoding
        lengths = self._rows.computed[:count]
        padded = [round_up(length + 1) for length in lengths.tolist()]
        if count * max(padded, default=0) - sum(padded) <= self.call_cost:
            return [(0, count)] if count else []
        found = None
        if ask:
            found = arrange(padded, self.call_cost, steps=_ORDER_STEPS, move_cost=_MOVE_COST)
        if found is None:
            return cut(padded, self.call_cost)
        for cycle in cycles(found.order):
            self._cache.rotate(cycle, lengths)
        self._rows.reorder(found.order)
        self._batch.reorder(found.order)
        self.reorders += 1
        return found.segments


__all__ = ["RowOrder", "call_cost_of"]
