"""Logs of sympy's own runner, `bin/test --verbose`."""

import re

from swe_eval.core.verdict import TestStatus
from swe_eval.grading.parsers.log import ParsedLog, Statuses, plain_lines

_RESULT = re.compile(r"(test_\w+) (ok|F|E|f|s|T|X)(?: +\[(?:OK|FAIL)\])?")
_HEADING = re.compile(r"_+ \S+\.py:(\w+) _+")
_TALLY = re.compile(r"tests finished: (?P<passed>\d+) passed")
_WORDS = {
    "ok": TestStatus.PASSED,
    "F": TestStatus.FAILED,
    "E": TestStatus.ERROR,
    "T": TestStatus.FAILED,
    "s": TestStatus.SKIPPED,
}
"""`f` and `X`, an expected failure and an unexpected pass, have no status."""


def parse_sympy(log: str) -> ParsedLog:
    """Reads a log of sympy's runner.

    Tests are told by their bare names, so tests of the same name in two files share a status: the
    worse one. The headings of tracebacks count too. More passes than the last line tells are a
    problem of the log. A line `test_y ok` that a test prints looks like the runner's, unless the
    number of passes betrays it.
    """
    statuses = Statuses()
    finished, told, shown = False, 0, 0
    for line in plain_lines(log):
        line = line.strip()
        result = _RESULT.fullmatch(line)
        heading = _HEADING.fullmatch(line)
        tally = _TALLY.search(line)
        if result is not None and result[2] in _WORDS:
            status = _WORDS[result[2]]
            statuses.add(result[1], status)
            shown += status is TestStatus.PASSED
        elif heading is not None:
            statuses.add(heading[1], TestStatus.FAILED)
        elif tally is not None:
            finished, told = True, told + int(tally["passed"])
    problem = ""
    if finished and shown > told:
        problem = f"{shown} tests are shown as passed, and {told} were counted"
    return ParsedLog(statuses=statuses.found, finished=finished, problem=problem)
