"""Which tasks are kept: from repeated gradings to a decision, and the file of decisions."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swe_eval.core.selftest import (
    Decision,
    Fault,
    Finding,
    Flaw,
    Outcome,
    Run,
    decide,
    flipped_tests,
    undecided,
)
from swe_eval.core.verdict import GradeReason, TestStatus, Verdict
from swe_eval.errors import TaskSetError
from swe_eval.tasks.selftest_file import Record, SelfTestFile, read_records

PASSED, FAILED, MISSING = TestStatus.PASSED, TestStatus.FAILED, TestStatus.MISSING


def solved(**statuses: TestStatus) -> Run:
    return Run(verdict=Verdict.SOLVED, statuses=statuses)


def unsolved(reason: GradeReason = GradeReason.TESTS_FAILED, **statuses: TestStatus) -> Run:
    return Run(verdict=Verdict.UNSOLVED, reason=reason, statuses=statuses)


GOOD = [solved(fix=PASSED, keep=PASSED)] * 2
BARE = [unsolved(fix=FAILED, keep=PASSED)] * 2


def flaws(decision: Decision) -> list[Flaw]:
    assert (decision.outcome is Outcome.QUARANTINED) == bool(decision.findings)
    return [finding.flaw for finding in decision.findings]


def test_a_task_that_gold_alone_solves_every_time_is_kept() -> None:
    assert decide(GOOD, BARE) == Decision(outcome=Outcome.KEPT)


@pytest.mark.parametrize(
    ("gold", "empty", "expected"),
    [
        ([], BARE, [Flaw.NO_REFERENCE]),
        ([unsolved()] * 2, BARE, [Flaw.GOLD_UNSOLVED]),
        ([unsolved(GradeReason.PATCH_REJECTED)] * 2, BARE, [Flaw.GOLD_UNSOLVED]),
        ([unsolved(GradeReason.TIMEOUT)] * 2, BARE, [Flaw.GOLD_EXCEEDS_LIMITS]),
        (
            [unsolved(GradeReason.TIMEOUT), unsolved(GradeReason.OUT_OF_MEMORY)],
            BARE,
            [Flaw.GOLD_EXCEEDS_LIMITS],
        ),
        ([unsolved(GradeReason.TIMEOUT), unsolved()], BARE, [Flaw.GOLD_UNSOLVED]),
        ([unsolved(GradeReason.OUT_OF_DISK)] * 2, BARE, [Flaw.GOLD_EXCEEDS_LIMITS]),
        ([unsolved(GradeReason.TESTS_ABORTED)] * 2, BARE, [Flaw.GOLD_UNSOLVED]),
        (GOOD, GOOD, [Flaw.EMPTY_SOLVED]),
        (BARE, GOOD, [Flaw.GOLD_UNSOLVED, Flaw.EMPTY_SOLVED]),
        ([GOOD[0], unsolved(GradeReason.TIMEOUT)], BARE, [Flaw.FLAKY]),
        ([GOOD[0], BARE[0]], GOOD, [Flaw.EMPTY_SOLVED, Flaw.FLAKY]),
        (GOOD, [BARE[0], GOOD[0]], [Flaw.FLAKY]),
        (GOOD, [BARE[0], unsolved(fix=FAILED, keep=FAILED)], [Flaw.FLAKY]),
    ],
)
def test_the_rest_is_quarantined_with_every_reason(
    gold: list[Run], empty: list[Run], expected: list[Flaw]
) -> None:
    assert flaws(decide(gold, empty)) == expected


def test_a_flaky_test_is_named() -> None:
    flaky = [solved(fix=PASSED, keep=PASSED), unsolved(fix=PASSED, keep=FAILED)]
    (finding,) = decide(flaky, BARE).findings
    assert finding.tests == ("keep",)
    assert finding.detail == (
        "the reference solution was solved 1 of 2 times; ended differently: keep"
    )


def test_what_the_clock_cut_short_is_no_flaky_test() -> None:
    """Where a loop is the bug, it is chance which tests came before the limit."""
    cut = [
        unsolved(GradeReason.TIMEOUT, fix=MISSING, keep=PASSED),
        unsolved(GradeReason.TIMEOUT, fix=MISSING, keep=MISSING),
    ]
    assert decide(GOOD, cut).outcome is Outcome.KEPT


def test_a_test_that_is_there_in_one_run_alone_has_flipped() -> None:
    assert flipped_tests([solved(a=PASSED), solved(a=PASSED, b=PASSED)]) == ("b",)
    assert flipped_tests([solved(a=PASSED), solved(a=PASSED, b=MISSING)]) == ()


RUNS = st.builds(
    Run,
    verdict=st.sampled_from(Verdict),
    reason=st.sampled_from(GradeReason),
    statuses=st.dictionaries(st.sampled_from("ab"), st.sampled_from(TestStatus)),
)


@given(st.lists(RUNS, max_size=4), st.lists(RUNS, min_size=1, max_size=4), st.randoms())
def test_a_task_is_kept_only_if_nothing_speaks_against_it_in_whatever_order(
    gold: list[Run], empty: list[Run], chance: object
) -> None:
    decision = decide(gold, empty)
    fine = (
        bool(gold)
        and all(run.verdict is Verdict.SOLVED for run in gold)
        and all(run.verdict is Verdict.UNSOLVED for run in empty)
        and not flipped_tests(gold)
        and not flipped_tests(empty)
    )
    assert (decision.outcome is Outcome.KEPT) == fine
    chance.shuffle(gold)  # type: ignore[attr-defined]
    chance.shuffle(empty)  # type: ignore[attr-defined]
    assert flaws(decide(gold, empty)) == flaws(decision)
    # More of the same changes nothing.
    assert flaws(decide(gold * 2, empty * 2)) == flaws(decision)


# -- the file


def record(name: str, decision: Decision, *, digest: str = "d", repeat: int = 2) -> Record:
    return Record(
        task_id=name, digest=digest, repeat=repeat, decision=decision, wall_s=1.5, judge="j"
    )


KEPT = Decision(outcome=Outcome.KEPT)
FLAKY = Decision(
    outcome=Outcome.QUARANTINED,
    findings=(Finding(flaw=Flaw.FLAKY, detail="é", tests=("a", "b")),),
)
FAULTED = undecided(Fault(cause="IMAGE", stage="START_SANDBOX", message="none"))


def test_records_are_read_as_they_were_written_and_the_last_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "new" / "selftest.jsonl"
    file = SelfTestFile(path)
    for decision in (FAULTED, KEPT):
        file.add(record("a", decision))
    file.add(record("b", FLAKY))
    file.close()
    assert read_records(path) == {"a": record("a", KEPT), "b": record("b", FLAKY)}


def test_known_is_the_same_task_by_the_same_judge_as_often_and_without_a_fault(
    tmp_path: Path,
) -> None:
    file = SelfTestFile(tmp_path / "f")
    for name, decision in (("good", KEPT), ("bad", FLAKY), ("fault", FAULTED)):
        file.add(record(name, decision))
    assert file.known("good", "d", 2, "j") == record("good", KEPT)
    assert file.known("bad", "d", 1, "j") == record("bad", FLAKY)
    assert file.known("good", "d", 3, "j") is None
    assert file.known("good", "another", 2, "j") is None
    assert file.known("good", "d", 2, "another") is None
    assert file.known("fault", "d", 2, "j") is None
    assert file.known("absent", "d", 2, "j") is None
    file.close()


def test_a_record_from_before_judges_were_told_apart_is_read_and_tested_anew(
    tmp_path: Path,
) -> None:
    path = tmp_path / "f"
    file = SelfTestFile(path)
    file.add(record("a", FLAKY))
    file.close()
    path.write_text(path.read_text().replace('"judge":"j",', ""))
    assert read_records(path) == {"a": replace(record("a", FLAKY), judge="")}
    file = SelfTestFile(path)
    assert file.known("a", "d", 2, "j") is None
    file.close()


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_line_that_a_crash_cut_off_is_none_and_is_written_anew(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "f"
    for name in ("a", "b"):
        file = SelfTestFile(path)
        file.add(record(name, KEPT))
        file.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"\n") + 1 + cut])
    assert list(read_records(path)) == ["a"]
    file = SelfTestFile(path)
    file.add(record("b", KEPT))
    file.close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("content", ["a note\n", "a note", "[1]\n", '{"task_id": "x"}\n', "\n"])
def test_another_file_is_refused_and_left_as_it_is(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes"
    path.write_text(content)
    for read in (read_records, SelfTestFile):
        with pytest.raises(TaskSetError, match=r"notes:1: .*tailrace tasks selftest"):
            read(path)
    assert path.read_text() == content
    with pytest.raises(TaskSetError, match="No such file"):
        read_records(tmp_path / "absent")


def test_a_file_is_for_one_self_test_at_a_time_and_the_second_is_told_whose(tmp_path: Path) -> None:
    path = tmp_path / "f"
    first = SelfTestFile(path)
    first.add(record("a", KEPT))
    whole = path.read_bytes()
    with pytest.raises(
        TaskSetError, match=rf"f is in use by another self-test \(process {os.getpid()}"
    ):
        SelfTestFile(path)
    assert path.read_bytes() == whole
    first.close()
    second = SelfTestFile(path)
    assert list(second.records) == ["a"]
    second.close()


def test_nothing_that_came_to_stand_in_the_file_meanwhile_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "f"
    file = SelfTestFile(path)
    file.add(record("b", KEPT))
    line = path.read_bytes().replace(b'"b"', b'"a"')
    with path.open("ab") as other:
        other.write(line)
    file.add(record("c", KEPT))
    file.close()
    assert list(read_records(path)) == ["b", "a", "c"]


@pytest.mark.parametrize("place", ["", "f/y", "/proc/x/y", "/dev/null"])
def test_a_place_that_can_hold_no_file_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(TaskSetError, match=r"name (another file|one for the records)"):
        SelfTestFile(tmp_path / place)
