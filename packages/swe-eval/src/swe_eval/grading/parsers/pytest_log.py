"""Logs of pytest, bare or under tox: progress with `-v`, and the summary that `-r` asks for."""

import re

from swe_eval.core.verdict import TestStatus
from swe_eval.grading.parsers.log import ParsedLog, Statuses, plain_lines

_WORDS = {
    "PASSED": TestStatus.PASSED,
    "XFAIL": TestStatus.PASSED,
    "FAILED": TestStatus.FAILED,
    "ERROR": TestStatus.ERROR,
    "SKIPPED": TestStatus.SKIPPED,
}
_LOWERING = {"FAILED", "ERROR"}
_RESULT = re.compile(r"(PASSED|XFAIL|FAILED|ERROR|SKIPPED) +(\S.*)")
_PERCENT = re.compile(r"\[ *\d+%\]")
_HEADING = re.compile(r"=+ (.+?) =+")
_SUMMARY = "short test summary info"
_SECTIONS = re.compile(
    r"FAILURES|ERRORS|PASSES|XFAILURES|XPASSES|warnings summary.*|rerun test summary info"
    r"|slowest .*durations|" + _SUMMARY
)
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|xpassed|deselected|warnings?)")
_TALLY = re.compile(
    rf"(?:=+ )?(?P<counts>no tests ran|no tests collected.*|{_COUNT.pattern}(?:, \d+ [a-z ]+?)*)"
    r" in [\d.:]+ ?s(?:econds)?(?: \([\d:]+\))?(?: =+)?"
)
_PRETTY_TALLY = re.compile(r"Results \([\d.:]+s(?: \([\d:]+\))?\):")


def parse_pytest(log: str, *, short_paths: bool = False, plain_buttons: bool = False) -> ParsedLog:
    """Reads a log of pytest.

    A pass counts in two places only: in the progress, before the first section, and in the last
    summary. What tests print is shown in sections between these, so that a printed result is none;
    with `-s`, or from below Python, it may stand within the progress. A failure counts against a
    test wherever it stands. More passes than the last line tells are a problem of the log.

    It can't tell from the real one a summary that an exit handler prints after it. A test that has
    failed stays failed; one that never ran or was skipped can be made to look passed.

    Args:
        log: The output of one run of pytest.
        short_paths: Parameters that are absolute paths are cut to their last part, as in the ids
            of data sets made on other machines.
        plain_buttons: Matplotlib's mouse buttons are written as numbers, as older Pythons do.
    """
    reader = _Reader(short_paths, plain_buttons)
    for line in plain_lines(log):
        reader.read(line)
    return reader.result()


class _Reader:
    def __init__(self, short_paths: bool, plain_buttons: bool) -> None:
        self._short_paths = short_paths
        self._plain_buttons = plain_buttons
        self._place = "progress"
        self._progress = Statuses()
        self._summary = Statuses()
        self._elsewhere: dict[str, TestStatus] = {}
        self._tally: dict[str, int] | None = None

    def read(self, line: str) -> None:
        tally = _TALLY.fullmatch(line)
        heading = _HEADING.fullmatch(line)
        if tally is not None or _PRETTY_TALLY.fullmatch(line):
            self._place = "end" if tally else "pretty end"
            self._tally = _counts(tally["counts"]) if tally else {}
        elif heading is not None and _SECTIONS.fullmatch(heading[1]):
            self._open_section(heading[1])
        elif self._place == "pretty end" and self._tally is not None and _COUNT.search(line):
            self._tally.update(_counts(line))
        else:
            self._read_result(line)

    def _open_section(self, title: str) -> None:
        self._place = title
        if title == _SUMMARY:
            # An earlier one was printed by a test: of what it says, only failures are kept.
            self._elsewhere |= _failures(self._summary)
            self._summary = Statuses()

    def _read_result(self, line: str) -> None:
        result = _RESULT.fullmatch(line)
        if result is None:
            name, word = _progress(line)
            if "::" in name and word in _WORDS:
                self._note(self._progress, "progress", self._name(name), word)
            return
        word, text = result.groups()
        name = self._name(text if word == "PASSED" else _without_reason(text))
        # `SKIPPED [2] test_a.py:5: reason` counts places, and logging writes `ERROR name:...`.
        if "::" in name or (word in _LOWERING and self._place == _SUMMARY):
            self._note(self._summary, _SUMMARY, name, word)

    def _note(self, statuses: Statuses, place: str, name: str, word: str) -> None:
        if self._place == place:
            statuses.add(name, _WORDS[word])
        elif word in _LOWERING:
            self._elsewhere[name] = _WORDS[word]

    def _name(self, name: str) -> str:
        if self._plain_buttons:
            name = name.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3")
        test, _, parameter = name.removesuffix("]").partition("[")
        is_path = parameter.startswith("/") and not parameter.startswith("//")
        if self._short_paths and is_path and "*" not in parameter:
            return f"{test}[/{parameter.rpartition('/')[2]}]"
        return name

    def result(self) -> ParsedLog:
        statuses = Statuses(dict(self._progress.found))
        for name, status in self._summary.found.items():
            statuses.add(name, status)
        for name, status in self._elsewhere.items():
            if name in statuses.found:
                statuses.add(name, status)
        problem = ""
        if self._tally is not None:
            told = self._tally.get("passed", 0) + self._tally.get("xfailed", 0)
            shown = max(s.count(TestStatus.PASSED) for s in (self._progress, self._summary))
            if shown > told:
                problem = f"{shown} tests are shown as passed, and {told} were counted"
        return ParsedLog(statuses=statuses.found, finished=self._tally is not None, problem=problem)


def _failures(statuses: Statuses) -> dict[str, TestStatus]:
    bad = (TestStatus.FAILED, TestStatus.ERROR)
    return {name: status for name, status in statuses.found.items() if status in bad}


def _counts(text: str) -> dict[str, int]:
    return {word: int(number) for number, word in _COUNT.findall(text)}


# A test can print what it likes, so what reads a line takes time in proportion to its length.


def _progress(line: str) -> tuple[str, str]:
    """Test and result of `test RESULT (reason) [ 50%]`, or two texts that are none."""
    text, _, percent = line.rpartition(" [")
    if not _PERCENT.fullmatch(f"[{percent}"):
        text = line
    text = text.rstrip()
    if text.endswith(")"):
        ends = [at + len(w) + 1 for w in _WORDS if (at := text.find(f" {w} (")) >= 0]
        text = text[: min(ends, default=0)]
    name, _, word = text.rpartition(" ")
    return name.rstrip().partition(" <- ")[0], word


def _without_reason(text: str) -> str:
    """The id in front of ` - reason`; a dash within its parameters does not end it."""
    start = depth = 0
    while (at := text.find(" - ", start)) >= 0:
        depth += text.count("[", start, at) - text.count("]", start, at)
        if depth <= 0:
            return text[:at]
        start = at + 1
    return text.partition(" - ")[0]
