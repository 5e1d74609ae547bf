"""Which decoding rows share one attention call, and in which order rows waste least. Pure.

Rows of one call are padded to the longest of them. When lengths differ much it pays to cut the rows
into several calls, and to have rows of like length side by side. All decoding rows grow by one
token a step, so what is found goes on holding until a sequence comes or goes.

Costs are counted in padded positions: the time of one position of one row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Segment = tuple[int, int]
"""Rows `[first, end)`."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Rows in another order.

    Attributes:
        order: For each place the row that it gets.
        segments: Of the places.
    """

    order: list[int]
    segments: list[Segment]


def cut(lengths: Sequence[int], call_cost: int) -> list[Segment]:
    """Cut rows as they stand, in one pass: a row joins unless that wastes more than a call costs.

    Args:
        lengths: Of the decoding rows.
        call_cost: What one more call costs, in padded positions.
    """
    segments: list[Segment] = []
    first = longest = 0
    for row, length in enumerate(lengths):
        wasted = longest - length if length <= longest else (length - longest) * (row - first)
        if row > first and wasted > call_cost:
            segments.append((first, row))
            first, longest = row, length
        longest = max(longest, length)
    if lengths:
        segments.append((first, len(lengths)))
    return segments


def cost(lengths: Sequence[int], segments: Iterable[Segment], call_cost: int) -> int:
    """Return what a step's attention costs."""
    return sum(max(lengths[first:end]) * (end - first) + call_cost for first, end in segments)


def arrange(
    lengths: Sequence[int], call_cost: int, *, steps: int, move_cost: int
) -> Arrangement | None:
    """Find the cheapest arrangement, and return it if moving rows there pays within some steps.

    Rows that are among others of like length already stay where they are.

    Args:
        lengths: Of the decoding rows.
        call_cost: What one more call costs, in padded positions.
        steps: Until the question is asked again.
        move_cost: What moving one position of a row costs, in padded positions.
    """
    by_length = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    segments = _cheapest_cut([lengths[row] for row in by_length], call_cost)
    order = list(range(len(lengths)))
    misplaced: list[int] = []
    holes: list[int] = []
    for first, end in segments:
        wanted = set(by_length[first:end])
        misplaced += [row for row in by_length[first:end] if not first <= row < end]
        holes += [place for place in range(first, end) if place not in wanted]
    for place, row in zip(holes, misplaced, strict=True):
        order[place] = row
    arranged = [lengths[row] for row in order]
    saved = cost(lengths, cut(lengths, call_cost), call_cost) - cost(arranged, segments, call_cost)
    if saved * steps <= move_cost * sum(lengths[row] for row in misplaced):
        return None
    return Arrangement(order, segments)


def _cheapest_cut(falling: Sequence[int], call_cost: int) -> list[Segment]:
    """Cut rows of falling length at the least cost there is, by dynamic programming."""
    ends = [0]
    for _, run in itertools.groupby(falling):
        ends.append(ends[-1] + sum(1 for _ in run))
    costs = [0] * len(ends)
    starts = [0] * len(ends)
    for last in range(1, len(ends)):
        costs[last], starts[last] = min(
            (costs[start] + falling[ends[start]] * (ends[last] - ends[start]) + call_cost, start)
            for start in range(last)
        )
    segments: list[Segment] = []
    last = len(ends) - 1
    while last > 0:
        segments.append((ends[starts[last]], ends[last]))
        last = starts[last]
    return segments[::-1]


def cycles(order: Sequence[int]) -> list[list[int]]:
    """Split an order into its cycles: each place of a cycle gets the row of the next one."""
    left = {place: row for place, row in enumerate(order) if place != row}
    found: list[list[int]] = []
    while left:
        place = next(iter(left))
        cycle = []
        while place in left:
            cycle.append(place)
            place = left.pop(place)
        found.append(cycle)
    return found


__all__ = ["Arrangement", "Segment", "arrange", "cost", "cut", "cycles"]
