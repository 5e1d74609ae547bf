"""Whether a task can be trusted: what its reference and no change at all came to, repeatedly.

A task is kept when its reference solution was solved and the untouched repository was not, every
time and with the same result of every test. Anything else quarantines it, each finding with its
reason. What infrastructure does wrong says nothing about a task: it is told apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from swe_eval.core.verdict import GradeReason, TestStatus, Verdict


class Outcome(StrEnum):
    """What to do with a task."""

    KEPT = "kept"
    QUARANTINED = "quarantined"
    FAULT = "fault"
    """Not known: infrastructure failed, also when tried again. To be tested another time."""


class Flaw(StrEnum):
    """Why a task is quarantined."""

    NO_REFERENCE = "no_reference"
    """It has no reference solution, so nothing shows that it can be solved."""
    GOLD_UNSOLVED = "gold_unsolved"
    """The reference solution is graded as unsolved, as an agent's equal one would be."""
    GOLD_EXCEEDS_LIMITS = "gold_exceeds_limits"
    """So it is, for time, memory or disk."""
    EMPTY_SOLVED = "empty_solved"
    """The hidden tests pass in the untouched repository."""
    FLAKY = "flaky"
    """The same work came to other verdicts or other results of single tests."""


_LIMITS = {GradeReason.TIMEOUT, GradeReason.OUT_OF_MEMORY, GradeReason.OUT_OF_DISK}
# Only there each test had its chance to end; elsewhere it is the clock that says which ones did.
_WHOLE_RUNS = {GradeReason.NONE, GradeReason.TESTS_FAILED, GradeReason.TESTS_MISSING}
_NAMED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One grading of the reference solution, or of the untouched repository."""

    verdict: Verdict
    reason: GradeReason = GradeReason.NONE
    detail: str = ""
    statuses: Mapping[str, TestStatus] = field(default_factory=dict)
    """Of the required tests; empty where a script judges all of them as one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A grading that infrastructure kept from a verdict, as often as it was tried."""

    cause: str
    """Name of a `tailrace.common.v1.FaultCause`."""
    stage: str
    """Name of the grading's stage; may be empty."""
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One reason to quarantine a task."""

    flaw: Flaw
    detail: str = ""
    tests: tuple[str, ...] = ()
    """The tests that flipped, for `FLAKY`."""

    def __str__(self) -> str:
        return f"{self.flaw}: {self.detail}" if self.detail else str(self.flaw)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What became of a task, with every reason."""

    outcome: Outcome
    findings: tuple[Finding, ...] = ()
    fault: Fault | None = None


def decide(gold: Sequence[Run], empty: Sequence[Run]) -> Decision:
    """Keeps or quarantines a task.

    Args:
        gold: Runs with the reference solution, all of the same work. None at all: there is no
            reference.
        empty: Runs in the untouched repository.
    """
    findings: list[Finding] = []
    if not gold:
        findings.append(
            Finding(flaw=Flaw.NO_REFERENCE, detail="nothing shows that it can be solved")
        )
    elif all(run.verdict is Verdict.UNSOLVED for run in gold):
        exceeded = all(run.reason in _LIMITS for run in gold)
        flaw = Flaw.GOLD_EXCEEDS_LIMITS if exceeded else Flaw.GOLD_UNSOLVED
        findings.append(Finding(flaw=flaw, detail=_why(gold[0])))
    if empty and all(run.verdict is Verdict.SOLVED for run in empty):
        findings.append(Finding(flaw=Flaw.EMPTY_SOLVED, detail="its tests pass without a change"))
    for what, runs in (("the reference solution", gold), ("no change", empty)):
        findings += _flips(what, runs)
    outcome = Outcome.QUARANTINED if findings else Outcome.KEPT
    return Decision(outcome=outcome, findings=tuple(findings))


def undecided(fault: Fault) -> Decision:
    """The decision on a task of which a grading could not be had."""
    return Decision(outcome=Outcome.FAULT, fault=fault)


def flipped_tests(runs: Sequence[Run]) -> tuple[str, ...]:
    """Tests that ended differently in runs that came to their end, in order of their names."""
    whole = [run.statuses for run in runs if run.reason in _WHOLE_RUNS]
    names = {name for statuses in whole for name in statuses}
    return tuple(
        name
        for name in sorted(names)
        if len({statuses.get(name, TestStatus.MISSING) for statuses in whole}) > 1
    )


def _flips(what: str, runs: Sequence[Run]) -> list[Finding]:
    solved = sum(run.verdict is Verdict.SOLVED for run in runs)
    tests = flipped_tests(runs)
    if not tests and solved in {0, len(runs)}:
        return []
    detail = f"{what} was solved {solved} of {len(runs)} times"
    if tests:
        more = f" and {len(tests) - _NAMED} more" if len(tests) > _NAMED else ""
        detail += f"; ended differently: {', '.join(tests[:_NAMED])}{more}"
    elif unsolved := [run for run in runs if run.verdict is Verdict.UNSOLVED]:
        detail += f"; else {_why(unsolved[0])}"
    return [Finding(flaw=Flaw.FLAKY, detail=detail, tests=tests)]


def _why(run: Run) -> str:
    bad = [name for name, status in run.statuses.items() if status is not TestStatus.PASSED]
    parts = [str(run.reason), run.detail]
    if run.reason in _WHOLE_RUNS and bad:
        parts.append(", ".join(bad[:_NAMED]) + (" ..." if len(bad) > _NAMED else ""))
    return ": ".join(part for part in parts if part)
