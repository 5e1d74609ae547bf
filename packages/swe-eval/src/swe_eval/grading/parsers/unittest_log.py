"""Logs of unittest with `-v`, and of Django's runner, which is unittest with output between."""

import re

from swe_eval.core.verdict import TestStatus
from swe_eval.grading.parsers.log import ParsedLog, Statuses, plain_lines

_TEST = re.compile(r"\w+ \([\w.<>]+\)")
_RESULT = re.compile(r"(ok|FAIL|ERROR|skipped .*|expected failure|unexpected success)", re.I)
_DOTS = " ... "
_DETAIL = re.compile(r"(FAIL|ERROR): (\w+ \([\w.<>]+\)|.+?)(?: [\[(].*)?")
_RULE = re.compile(r"={70}")
_RAN = re.compile(r"Ran (\d+) tests? in [\d.]+s")
_LAST = re.compile(r"(OK|FAILED|NO TESTS RAN)(?: \(.*\))?")
_WORDS = {
    "ok": TestStatus.PASSED,
    "fail": TestStatus.FAILED,
    "error": TestStatus.ERROR,
    "unexpected success": TestStatus.FAILED,
}


def parse_unittest(log: str) -> ParsedLog:
    """Reads a log of unittest or of Django's runner.

    A test with a docstring takes two lines, `test_x (module.Class)` and the docstring's first, and
    is told under both: data sets name it by the second. Output may stand between a test's name and
    its result. The details at the end (`FAIL: test_x (module.Class)`) count as well, and bring in
    what failed in a subtest. An expected failure has no status. More passes and failed tests than
    `Ran N tests` tells are a problem of the log.

    It can't tell from a real one a line `test_y (module.Class) ... ok` that a test prints, unless
    `test_y` is run and fails, or the number of tests betrays it.
    """
    reader = _Reader()
    for line in plain_lines(log):
        reader.read(line.strip())
    return reader.result()


class _Reader:
    def __init__(self) -> None:
        self._statuses = Statuses()
        self._events = Statuses()
        self._last_test = ""
        self._open: tuple[str, ...] = ()
        self._also: dict[str, str] = {}
        self._after_rule = False
        self._ran: int | None = None
        self._finished = False

    def read(self, line: str) -> None:
        detail = _DETAIL.fullmatch(line) if self._after_rule else None
        ran = _RAN.fullmatch(line)
        if detail is not None:
            self._fail_again(detail[2], _WORDS[detail[1].lower()])
        elif ran is not None:
            self._ran = (self._ran or 0) + int(ran[1])
        elif self._ran is not None and _LAST.fullmatch(line):
            self._finished = True
        elif self._open and _RESULT.fullmatch(line):
            self._close(line)
        elif _DOTS in f"{line} ":
            self._read_named(line)
        if _TEST.fullmatch(line):
            self._last_test = line
        elif _DOTS in f"{line} ":
            self._last_test = ""
        self._after_rule = _RULE.fullmatch(line) is not None

    def _read_named(self, line: str) -> None:
        name, _, rest = line.rpartition(_DOTS)
        if name and _RESULT.fullmatch(rest.strip()):
            self._open = self._names(name)
            self._close(rest.strip())
            return
        name = f"{line} ".partition(_DOTS)[0]
        if self._last_test or _TEST.match(name):
            self._open = self._names(name)

    def _names(self, name: str) -> tuple[str, ...]:
        """The test's id if its line went before, and what stands before the dots."""
        if not self._last_test or _TEST.fullmatch(name):
            return (name,)
        self._also[self._last_test] = name
        return (self._last_test, name)

    def _close(self, word: str) -> None:
        word = word.lower()
        status = TestStatus.SKIPPED if word.startswith("skipped") else _WORDS.get(word)
        self._finished = False  # a script may run several; the last one must have ended
        if status is not None:
            for name in self._open:
                self._statuses.add(name, status)
            self._events.add(f"{len(self._events.found)} {self._open[0]}", status)
        self._open = ()

    def _fail_again(self, test: str, status: TestStatus) -> None:
        self._statuses.add(test, status)
        if test in self._also:
            self._statuses.add(self._also[test], status)

    def result(self) -> ParsedLog:
        problem = ""
        shown = self._events.count(TestStatus.PASSED, TestStatus.FAILED, TestStatus.ERROR)
        if self._ran is not None and self._finished and shown > self._ran:
            problem = f"{shown} tests have a result, and {self._ran} were run"
        return ParsedLog(statuses=self._statuses.found, finished=self._finished, problem=problem)
