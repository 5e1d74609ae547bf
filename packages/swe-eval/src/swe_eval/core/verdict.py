"""From what a grading run observed to a verdict: a pure function, strict in one direction.

A verdict is about the agent's change. What is not its doing (a broken sandbox, a test that even the
reference solution can't finish in the limits) is never a verdict: such a case asks for a run of the
reference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What a grader found. Infrastructure failures are errors, never verdicts."""

    SOLVED = "solved"
    UNSOLVED = "unsolved"


class TestStatus(StrEnum):
    """How one test ended. Anything but PASSED fails a required test."""

    __test__ = False  # keeps pytest from collecting the enum in test modules

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    SKIPPED = "skipped"
    MISSING = "missing"


class GradeReason(StrEnum):
    """Why a diff is unsolved; NONE when it is solved."""

    NONE = ""
    EMPTY_DIFF = "empty_diff"
    DIFF_TOO_LARGE = "diff_too_large"
    DIFF_MALFORMED = "diff_malformed"
    ONLY_PROTECTED_FILES = "only_protected_files"
    """Nothing is left of the diff without its changes to tests and test configuration."""
    UNSAFE_PATH = "unsafe_path"
    """The diff writes outside the work folder, or makes a link or a submodule."""
    PATCH_REJECTED = "patch_rejected"
    TESTS_FAILED = "tests_failed"
    TESTS_MISSING = "tests_missing"
    """A required test did not run or was skipped, and none failed."""
    TESTS_ABORTED = "tests_aborted"
    """The process under test ended before the tests did, as it does not with the reference."""
    RESULT_TAMPERED = "result_tampered"
    """Something wrote to the channel of the results."""
    CONTROL_PASSED = "control_passed"
    """Every test passed, and so did one that was altered to fail with any right program."""
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    OUT_OF_DISK = "out_of_disk"
    """The diff left no room for the tests."""
    REWARD_BELOW_ONE = "reward_below_one"
    """A Harbor verifier wrote a reward below 1."""
    NO_REWARD = "no_reward"
    """A Harbor verifier wrote no readable reward, though it does with the reference solution."""


class RunEnd(StrEnum):
    """How the run of the tests ended, as seen by the process that watched it."""

    FINISHED = "finished"
    ABORTED = "aborted"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    OUT_OF_DISK = "out_of_disk"
    TAMPERED = "tampered"


@dataclass(frozen=True, kw_only=True, slots=True)
class TestResult:
    """One test of the grader."""

    __test__ = False

    name: str
    required: bool
    status: TestStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """A verdict, and whether it stands only if the reference solution keeps the same limits."""

    verdict: Verdict
    reason: GradeReason
    tests: tuple[TestResult, ...] = ()
    needs_reference: bool = False


_ENDINGS_TO_CHECK = {
    RunEnd.TIMEOUT: GradeReason.TIMEOUT,
    RunEnd.OUT_OF_MEMORY: GradeReason.OUT_OF_MEMORY,
    RunEnd.OUT_OF_DISK: GradeReason.OUT_OF_DISK,
    RunEnd.ABORTED: GradeReason.TESTS_ABORTED,
}


def judge(*, required: Sequence[str], statuses: Mapping[str, TestStatus], end: RunEnd) -> Judgement:
    """Judges a run: SOLVED when it finished and every required test passed.

    Args:
        required: Fail-to-pass and pass-to-pass tests; at least one.
        statuses: What the runner saw; a required test that is not in it is missing.
        end: How the run ended.

    Raises:
        ValueError: nothing is required; such a task could not be failed.
    """
    if not required:
        raise ValueError("a grader needs at least one required test, got none")
    wanted = dict.fromkeys(required)
    tests = tuple(
        TestResult(name=name, required=True, status=statuses.get(name, TestStatus.MISSING))
        for name in wanted
    ) + tuple(
        TestResult(name=name, required=False, status=status)
        for name, status in statuses.items()
        if name not in wanted
    )
    if end in _ENDINGS_TO_CHECK:
        return Judgement(
            verdict=Verdict.UNSOLVED,
            reason=_ENDINGS_TO_CHECK[end],
            tests=tests,
            needs_reference=True,
        )
    if end is RunEnd.TAMPERED:
        return Judgement(verdict=Verdict.UNSOLVED, reason=GradeReason.RESULT_TAMPERED, tests=tests)
    found = {test.status for test in tests if test.required}
    if found == {TestStatus.PASSED}:
        return Judgement(verdict=Verdict.SOLVED, reason=GradeReason.NONE, tests=tests)
    failed = found & {TestStatus.FAILED, TestStatus.ERROR}
    reason = GradeReason.TESTS_FAILED if failed else GradeReason.TESTS_MISSING
    return Judgement(verdict=Verdict.UNSOLVED, reason=reason, tests=tests)


def judge_reward(reward: float | None, *, end: RunEnd) -> Judgement:
    """Judges a Harbor verifier by the reward it wrote: 1 or more is SOLVED.

    Args:
        reward: None when no readable reward was left.
        end: FINISHED, TIMEOUT, OUT_OF_MEMORY or OUT_OF_DISK.
    """
    if end in _ENDINGS_TO_CHECK:
        return Judgement(
            verdict=Verdict.UNSOLVED, reason=_ENDINGS_TO_CHECK[end], needs_reference=True
        )
    if reward is None:
        return Judgement(
            verdict=Verdict.UNSOLVED, reason=GradeReason.NO_REWARD, needs_reference=True
        )
    if reward >= 1.0:
        return Judgement(verdict=Verdict.SOLVED, reason=GradeReason.NONE)
    return Judgement(verdict=Verdict.UNSOLVED, reason=GradeReason.REWARD_BELOW_ONE)
