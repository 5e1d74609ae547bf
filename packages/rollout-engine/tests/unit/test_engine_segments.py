from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_engine.engines.cpu.segments import arrange, cost, cut, cycles

LENGTHS = st.lists(st.integers(1, 60).map(lambda n: 16 * n), min_size=1, max_size=12)
CALLS = st.integers(1, 600)


def every_cut(rows: int) -> list[list[tuple[int, int]]]:
    cuts = []
    for inner in itertools.product([False, True], repeat=rows - 1):
        edges = [0, *(i + 1 for i, at in enumerate(inner) if at), rows]
        cuts.append(list(itertools.pairwise(edges)))
    return cuts


def test_rows_of_like_length_share_a_call() -> None:
    assert cut([100, 110, 100], 320) == [(0, 3)]
    assert cut([], 320) == []


def test_a_row_of_another_length_gets_a_call_of_its_own() -> None:
    assert cut([100, 100, 100, 900, 100], 320) == [(0, 3), (3, 4), (4, 5)]


def test_rows_are_brought_together_when_that_pays() -> None:
    lengths = [900, 100, 900, 100, 900, 100, 900, 100]
    found = arrange(lengths, 320, steps=32, move_cost=4)
    assert found is not None
    assert found.segments == [(0, 4), (4, 8)]
    assert [lengths[row] for row in found.order] == [900] * 4 + [100] * 4
    # Half of the rows stay where they are.
    assert sum(place == row for place, row in enumerate(found.order)) == 4
    assert arrange(lengths, 320, steps=1, move_cost=40) is None


def test_rows_that_are_well_as_they_are_stay() -> None:
    assert arrange([900, 900, 100, 100], 320, steps=32, move_cost=4) is None
    assert arrange([100] * 5, 320, steps=32, move_cost=4) is None


@given(lengths=LENGTHS, call_cost=CALLS)
def test_segments_cover_the_rows_in_order(lengths: list[int], call_cost: int) -> None:
    segments = cut(lengths, call_cost)
    assert [row for first, end in segments for row in range(first, end)] == list(
        range(len(lengths))
    )


@settings(max_examples=60)
@given(lengths=LENGTHS.filter(lambda lengths: len(lengths) <= 9), call_cost=CALLS)
def test_an_arrangement_is_the_cheapest_there_is_and_loses_no_row(
    lengths: list[int], call_cost: int
) -> None:
    found = arrange(lengths, call_cost, steps=1, move_cost=0)
    now = cost(lengths, cut(lengths, call_cost), call_cost)
    falling = sorted(lengths, reverse=True)
    best = min(cost(falling, segments, call_cost) for segments in every_cut(len(lengths)))
    if found is None:
        assert now == best
        return
    assert sorted(found.order) == list(range(len(lengths)))
    arranged = [lengths[row] for row in found.order]
    assert cost(arranged, found.segments, call_cost) == best < now


@given(order=st.permutations(range(9)))
def test_cycles_carry_out_an_order(order: list[int]) -> None:
    content = list(range(9))
    for cycle in cycles(order):
        spare = content[cycle[0]]
        for target, source in itertools.pairwise(cycle):
            content[target] = content[source]
        content[cycle[-1]] = spare
    assert content == order
