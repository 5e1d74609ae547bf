from __future__ import annotations

import numpy as np
import pytest
from grpo_trainer.core.staleness import THROWN_AWAY, Lineage, LineageVersion


def lineage(*versions: tuple[int, int]) -> Lineage:
    return Lineage(LineageVersion(number, step) for number, step in versions)


def test_staleness_counts_optimizer_steps_and_not_version_numbers() -> None:
    # 4 and 9 are the same weights, published again by a resumed trainer; 5 to 8 were thrown away.
    found = lineage((1, 0), (2, 1), (4, 2), (9, 2), (10, 3)).staleness(
        np.array([10, 9, 4, 2, 1]), step=4
    )
    assert found.tolist() == [1, 2, 2, 3, 4]


def test_versions_of_a_branch_that_a_crash_threw_away_are_told_apart() -> None:
    found = lineage((1, 0), (4, 2), (9, 2)).staleness(np.array([4, 5, 8, 9]), step=2)
    assert found.tolist() == [0, THROWN_AWAY, THROWN_AWAY, 0]


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
