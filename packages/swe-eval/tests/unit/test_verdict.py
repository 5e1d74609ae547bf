import pytest
from hypothesis import given
from hypothesis import strategies as st
from swe_eval.core.verdict import (
    GradeReason,
    RunEnd,
    TestStatus,
    Verdict,
    judge,
    judge_reward,
)

P, F, E, S = TestStatus.PASSED, TestStatus.FAILED, TestStatus.ERROR, TestStatus.SKIPPED
names = st.sampled_from(["a", "b", "c", "d"])
required_lists = st.lists(names, min_size=1)


def test_solved_when_finished_and_every_required_test_passed() -> None:
    found = judge(required=["a", "b"], statuses={"a": P, "b": P}, end=RunEnd.FINISHED)
    assert (found.verdict, found.reason) == (Verdict.SOLVED, GradeReason.NONE)
    assert not found.needs_reference


@pytest.mark.parametrize(
    ("statuses", "reason"),
    [
        ({"a": P, "b": F}, GradeReason.TESTS_FAILED),
        ({"a": P, "b": E}, GradeReason.TESTS_FAILED),
        ({"a": P, "b": S}, GradeReason.TESTS_MISSING),
        ({"a": P}, GradeReason.TESTS_MISSING),
        ({}, GradeReason.TESTS_MISSING),
        ({"a": S, "b": F}, GradeReason.TESTS_FAILED),
    ],
)
def test_a_failed_skipped_or_missing_required_test_is_unsolved(
    statuses: dict[str, TestStatus], reason: GradeReason
) -> None:
    found = judge(required=["a", "b"], statuses=statuses, end=RunEnd.FINISHED)
    assert (found.verdict, found.reason) == (Verdict.UNSOLVED, reason)


def test_a_failing_test_that_is_not_required_does_not_count() -> None:
    found = judge(required=["a"], statuses={"a": P, "x": F}, end=RunEnd.FINISHED)
    assert found.verdict is Verdict.SOLVED
    assert [(t.name, t.required) for t in found.tests] == [("a", True), ("x", False)]


@pytest.mark.parametrize(
    ("end", "reason", "needs_reference"),
    [
        (RunEnd.ABORTED, GradeReason.TESTS_ABORTED, True),
        (RunEnd.TAMPERED, GradeReason.RESULT_TAMPERED, False),
        (RunEnd.TIMEOUT, GradeReason.TIMEOUT, True),
        (RunEnd.OUT_OF_MEMORY, GradeReason.OUT_OF_MEMORY, True),
    ],
)
def test_a_run_that_did_not_finish_is_never_solved(
    end: RunEnd, reason: GradeReason, needs_reference: bool
) -> None:
    found = judge(required=["a"], statuses={"a": P}, end=end)
    assert (found.verdict, found.reason) == (Verdict.UNSOLVED, reason)
    assert found.needs_reference is needs_reference


@given(required_lists, st.dictionaries(names, st.sampled_from(TestStatus)), st.sampled_from(RunEnd))
def test_solved_means_exactly_finished_and_all_required_passed(
    required: list[str], statuses: dict[str, TestStatus], end: RunEnd
) -> None:
    found = judge(required=required, statuses=statuses, end=end)
    honest = end is RunEnd.FINISHED and all(statuses.get(n) is P for n in required)
    assert (found.verdict is Verdict.SOLVED) == honest
    assert {t.name for t in found.tests if t.required} == set(required)


def test_a_grader_without_required_tests_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one required test"):
        judge(required=[], statuses={}, end=RunEnd.FINISHED)


@pytest.mark.parametrize(
    ("reward", "end", "verdict", "reason"),
    [
        (1.0, RunEnd.FINISHED, Verdict.SOLVED, GradeReason.NONE),
        (0.99, RunEnd.FINISHED, Verdict.UNSOLVED, GradeReason.REWARD_BELOW_ONE),
        (None, RunEnd.FINISHED, Verdict.UNSOLVED, GradeReason.NO_REWARD),
        (1.0, RunEnd.TIMEOUT, Verdict.UNSOLVED, GradeReason.TIMEOUT),
        (1.0, RunEnd.OUT_OF_MEMORY, Verdict.UNSOLVED, GradeReason.OUT_OF_MEMORY),
    ],
)
def test_harbor_rewards(
    reward: float | None, end: RunEnd, verdict: Verdict, reason: GradeReason
) -> None:
    found = judge_reward(reward, end=end)
    assert (found.verdict, found.reason) == (verdict, reason)
    assert found.needs_reference == (reason not in {"", GradeReason.REWARD_BELOW_ONE})
