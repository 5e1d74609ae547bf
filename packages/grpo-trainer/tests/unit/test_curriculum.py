from __future__ import annotations

import json
from itertools import islice

import pytest
from grpo_trainer.core.curriculum import Curriculum
from hypothesis import given
from hypothesis import strategies as st

TASKS = [f"t{index}" for index in range(7)]


def drawn(curriculum: Curriculum, count: int) -> list[str]:
    return [curriculum.draw() for _ in range(count)]


def test_each_pass_holds_every_task_once_in_another_order() -> None:
    curriculum = Curriculum(TASKS, seed=3)
    first, second = drawn(curriculum, 7), drawn(curriculum, 7)
    assert sorted(first) == sorted(second) == TASKS
    assert first != second


def test_the_seed_decides_the_order() -> None:
    assert drawn(Curriculum(TASKS, seed=1), 14) == drawn(Curriculum(TASKS, seed=1), 14)
    assert drawn(Curriculum(TASKS, seed=1), 14) != drawn(Curriculum(TASKS, seed=2), 14)


def test_quarantined_tasks_are_drawn_no_more() -> None:
    curriculum = Curriculum(TASKS, seed=0)
    curriculum.quarantine("t3")
    assert "t3" not in drawn(curriculum, 30)


def test_a_set_that_is_quarantined_whole_is_an_error() -> None:
    curriculum = Curriculum(["a", "b"], seed=0)
    curriculum.quarantine("a")
    curriculum.quarantine("b")
    with pytest.raises(LookupError, match="all 2 tasks are quarantined"):
        curriculum.draw()


def test_a_task_with_nothing_to_teach_is_left_out_for_some_passes() -> None:
    curriculum = Curriculum(TASKS, seed=0, avoid_after=2, avoid_passes=2)
    drawn(curriculum, 7)
    curriculum.record("t1", solved=8, attempts=8)
    curriculum.record("t1", solved=8, attempts=8)
    curriculum.record("t2", solved=0, attempts=8)
    curriculum.record("t2", solved=3, attempts=8)
    passes = [sorted(drawn(curriculum, 6)) for _ in range(2)]
    assert all("t1" not in found and "t2" in found for found in passes)
    assert sorted(drawn(curriculum, 7)) == TASKS


def test_avoiding_every_task_still_draws() -> None:
    curriculum = Curriculum(["a", "b"], seed=0, avoid_after=1, avoid_passes=5)
    curriculum.record("a", solved=0, attempts=4)
    curriculum.record("b", solved=4, attempts=4)
    assert set(drawn(curriculum, 4)) <= {"a", "b"}


@given(st.integers(0, 40), st.integers(0, 9))
def test_a_restored_curriculum_goes_on_exactly(before: int, seed: int) -> None:
    original = Curriculum(TASKS, seed=seed, avoid_after=1)
    for number, task in enumerate(islice(iter(original.draw, None), before)):
        original.record(task, solved=number % 3, attempts=2)
    if before > 5:
        original.quarantine("t5")
    copy = Curriculum(TASKS, seed=seed, avoid_after=1)
    copy.restore(json.loads(json.dumps(original.snapshot())))
    assert drawn(copy, 25) == drawn(original, 25)


def test_restoring_over_another_task_set_is_refused() -> None:
    with pytest.raises(ValueError, match="7 tasks"):
        Curriculum(["a"], seed=0).restore(Curriculum(TASKS, seed=0).snapshot())
