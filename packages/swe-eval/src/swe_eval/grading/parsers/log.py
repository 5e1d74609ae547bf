"""What all log parsers share: their result, the part of a log that counts, and required tests."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from swe_eval.core.verdict import RunEnd, TestStatus

START_OF_TESTS = ">>>>> Start Test Output"
END_OF_TESTS = ">>>>> End Test Output"
EXIT_CODE = ">>>>> Test Exit Code"

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_BY_SEVERITY = (
    TestStatus.MISSING,
    TestStatus.PASSED,
    TestStatus.SKIPPED,
    TestStatus.FAILED,
    TestStatus.ERROR,
)
_FAILURES = frozenset({TestStatus.FAILED, TestStatus.ERROR})


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedLog:
    """What a log says."""

    statuses: Mapping[str, TestStatus]
    """By the name that the runner prints. Expected failures are PASSED."""
    finished: bool
    """Whether the runner has written its last line."""
    problem: str = ""
    """How the log contradicts itself; empty if it does not."""


LogParser = Callable[[str], ParsedLog]


@dataclass(slots=True)
class Statuses:
    """Collects statuses; the worst word about a test stands."""

    found: dict[str, TestStatus] = field(default_factory=dict)

    def add(self, name: str, status: TestStatus) -> None:
        """Notes what one line says."""
        before = self.found.get(name, TestStatus.MISSING)
        self.found[name] = max(before, status, key=_BY_SEVERITY.index)

    def count(self, *statuses: TestStatus) -> int:
        """How many tests have one of these."""
        return sum(status in statuses for status in self.found.values())


def plain_lines(log: str) -> list[str]:
    """Lines without colours and ends."""
    return [line.rstrip() for line in _COLOURS.sub("", log).split("\n")]


@dataclass(frozen=True, slots=True)
class GradedPart:
    """The tests' output within the log of a whole evaluation script."""

    text: str
    end: RunEnd = RunEnd.FINISHED
    """ABORTED where a marker is missing, TAMPERED where one is there twice."""
    detail: str = ""
    exit_code: int | None = None
    """The test command's, where the script has told it."""


def graded_part(log: str, *, nonce: str = "") -> GradedPart:
    """Cuts out what stands between the markers of tests.

    An evaluation script traces its commands, and also shows the change under test. So each marker
    must stand on one line alone: a change that brings its own would move the borders. Runs of ours
    add a nonce to the markers.
    """
    start = _marker_lines(log, START_OF_TESTS + nonce)
    end = _marker_lines(log, END_OF_TESTS + nonce)
    if not start or not end:
        which = "begun" if not start else "ended"
        return GradedPart("", RunEnd.ABORTED, f"the script has not {which} the tests")
    if len(start) > 1 or len(end) > 1 or start[0].start() > end[0].start():
        return GradedPart("", RunEnd.TAMPERED, "the markers of the tests are not there once each")
    rest = log[end[0].end() :]
    code = re.search(rf"^{re.escape(EXIT_CODE + nonce)}: (\d+)$", rest, re.MULTILINE)
    return GradedPart(
        log[start[0].end() : end[0].start()], exit_code=int(code[1]) if code else None
    )


def _marker_lines(log: str, marker: str) -> list[re.Match[str]]:
    # A marker that is echoed has its trace on the line before.
    line = rf"^.*{re.escape(marker)}(?![^\n']).*(?:\n|\Z)"
    return list(re.finditer(f"(?:{line})+", log, re.MULTILINE))


def run_end(parsed: ParsedLog, *, exit_code: int | None = None) -> tuple[RunEnd, str]:
    """How the run of the tests ended as far as its log tells, and why that is thought."""
    if parsed.problem:
        return RunEnd.TAMPERED, parsed.problem
    if not parsed.finished:
        return RunEnd.ABORTED, "the log ends before the runner does"
    if exit_code and _FAILURES.isdisjoint(parsed.statuses.values()):
        return RunEnd.ABORTED, f"exit code {exit_code}, and no test has failed"
    return RunEnd.FINISHED, ""


def required_statuses(
    required: Sequence[str], statuses: Mapping[str, TestStatus]
) -> dict[str, TestStatus]:
    """The statuses of required tests; a test that is not in the log is not in the result.

    Data sets hold ids that were cut at a blank within their parameters (`test_x[a`). Such an id,
    and no other, stands for all tests that begin with it, and the worst of them counts.
    """
    found = Statuses()
    for name in required:
        if name in statuses:
            found.add(name, statuses[name])
        elif name.count("[") > name.count("]"):
            for other, status in statuses.items():
                if other.startswith(name):
                    found.add(name, status)
    return found.found
