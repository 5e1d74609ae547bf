from __future__ import annotations

import numpy as np
import pytest
from grpo_trainer.core.staleness import FORGOTTEN, Lineage, LineageVersion
from hypothesis import given
from hypothesis import strategies as st


def lineage(*versions: tuple[int, int]) -> Lineage:
    return Lineage(LineageVersion(number, step) for number, step in versions)


def test_staleness_counts_optimizer_steps_and_not_version_numbers() -> None:
    # 4 and 9 are the same weights, published again by a resumed trainer; 5 to 8 were thrown away.
    found = lineage((1, 0), (2, 1), (4, 2), (9, 2), (10, 3)).staleness(
        np.array([10, 9, 4, 2, 1]), step=4
    )
    assert found.tolist() == [1, 2, 2, 3, 4]


def test_a_version_of_a_branch_that_a_crash_threw_away_is_as_old_as_the_way_to_it_is_long() -> None:
    # A trainer published 5, 6 and 7 on top of 4, died, and went on from 4's weights as 8.
    versions = lineage((1, 0), (4, 2), (8, 2), (9, 3))
    found = versions.staleness(np.array([4, 5, 7, 8, 9]), step=3)
    assert found.tolist() == [1, 1 + 1, 1 + 3, 1, 0]
    assert versions.off(np.array([4, 5, 7, 8, 9])).tolist() == [False, True, True, False, False]


def test_a_version_from_before_all_that_is_known_is_too_old_for_any_bound() -> None:
    found = lineage((4, 2), (5, 3)).staleness(np.array([3, 4]), step=3)
    assert found.tolist() == [FORGOTTEN, 1]


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.data())
def test_ages_are_the_lengths_of_ways_in_the_tree_of_versions(
    crashes: list[bool], data: st.DataObject
) -> None:
    """Trainers that step and publish, or die and go on from an earlier step of their lineage."""
    parents = {1: 0}  # version: the one whose weights it was stepped from, or is again
    steps = {1: 0}
    held = [(1, 0)]
    for number, crash in enumerate(crashes, start=2):
        if crash:
            held = held[: data.draw(st.integers(1, len(held)))]
        parents[number] = held[-1][0]
        steps[number] = held[-1][1] + (not crash)
        held.append((number, steps[number]))
    newest, step = held[-1]

    def ancestors(number: int) -> list[int]:
        return [number, *ancestors(parents[number])] if number else []

    on_the_way = ancestors(newest)
    for number in steps:
        branch = [a for a in ancestors(number) if a not in on_the_way]
        fork = next(a for a in ancestors(number) if a in on_the_way)
        way = step - steps[fork] + steps[number] - steps[fork]
        (age,) = lineage(*held).staleness(np.array([number]), step=step).tolist()
        assert age == way if not branch else age >= way


def test_no_tokens_have_no_staleness() -> None:
    assert lineage((1, 0)).staleness(np.zeros(0, np.int64), step=3).tolist() == []


@pytest.mark.parametrize(("number", "step"), [(3, 2), (2, 2), (4, 0)])
def test_numbers_must_rise_and_steps_must_not_fall(number: int, step: int) -> None:
    with pytest.raises(ValueError, match="expected a number above 3"):
        lineage((1, 0), (3, 1)).publish(number, step)


def test_oldest_number_at_a_step_is_the_first_that_new() -> None:
    versions = lineage((1, 0), (2, 1), (4, 2), (9, 2))
    assert [versions.oldest_number_at(step) for step in (0, 1, 2, 3)] == [1, 2, 4, 9]
    assert Lineage().oldest_number_at(0) == 0


def test_trimming_forgets_what_is_older_than_asked() -> None:
    trimmed = lineage((1, 0), (2, 1), (3, 2), (4, 3)).trimmed(keep_steps=1)
    assert [version.number for version in trimmed.versions] == [3, 4]
    assert trimmed.newest == LineageVersion(4, 3)
