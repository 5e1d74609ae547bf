"""What a self-test found of each task, one JSON object a line.

It is a journal, to which a task is added as soon as it is decided, so that a self-test goes on
where it was stopped; and the list of tasks that a task set leaves out (`quarantine`). Of several
lines on a task the last one counts, and a last line that was cut off by a crash is none.
"""

import fcntl
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from swe_eval.core.selftest import Decision, Fault, Finding, Flaw, Outcome
from swe_eval.errors import TaskSetError
from swe_eval.journal import write_line

_EXPECTED = "a file that `tailrace tasks selftest` wrote"
_START = b'{"task_id":'


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The decision on one task.

    Attributes:
        task_id: The task.
        digest: Of the task as it was tested (`tasks.digest.task_digest`).
        repeat: How often the reference, and no change, were graded.
        decision: What came of it.
        wall_s: How long that took.
        judge: Digest of the code that decided (`grading.identity.judge_digest`); empty in files
            that are older than it.
    """

    task_id: str
    digest: str
    repeat: int
    decision: Decision
    wall_s: float = 0.0
    judge: str = ""

    def to_json(self) -> dict[str, Any]:
        """As a line of the file."""
        decision = self.decision
        return {
            "task_id": self.task_id,
            "digest": self.digest,
            "judge": self.judge,
            "repeat": self.repeat,
            "outcome": decision.outcome.value,
            "findings": [asdict(finding) for finding in decision.findings],
            "fault": None if decision.fault is None else asdict(decision.fault),
            "wall_s": round(self.wall_s, 3),
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Self:
        """From a line of the file; raises KeyError, TypeError or ValueError if it is none."""
        findings = tuple(
            Finding(flaw=Flaw(f["flaw"]), detail=str(f["detail"]), tests=tuple(f["tests"]))
            for f in line["findings"]
        )
        decision = Decision(
            outcome=Outcome(line["outcome"]),
            findings=findings,
            fault=None if line["fault"] is None else Fault(**line["fault"]),
        )
        return cls(
            task_id=str(line["task_id"]),
            digest=str(line["digest"]),
            repeat=int(line["repeat"]),
            decision=decision,
            wall_s=float(line["wall_s"]),
            judge=str(line.get("judge", "")),
        )


def read_records(path: Path) -> dict[str, Record]:
    """The records by task.

    Raises:
        TaskSetError: the file is not there, or not one of a self-test.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TaskSetError(f"{path}: {error.strerror}; expected {_EXPECTED}") from error
    return _read(path, content)[0]


def _read(path: Path, content: bytes) -> tuple[dict[str, Record], int]:
    """The records, and how many bytes they take up: less than all after a crash."""
    found: dict[str, Record] = {}
    whole = content.rfind(b"\n") + 1
    for number, line in enumerate(content[:whole].splitlines(), 1):
        try:
            record = Record.from_json(json.loads(line))
        except (KeyError, TypeError, ValueError) as error:
            raise _strange(path, number, line) from error
        found[record.task_id] = record
    rest = content[whole:]
    if not rest.startswith(_START) and not _START.startswith(rest):
        raise _strange(path, content.count(b"\n") + 1, rest)
    return found, whole


def _strange(path: Path, number: int, line: bytes) -> TaskSetError:
    return TaskSetError(f"{path}:{number}: found {line[:80]!r}, expected a line of {_EXPECTED}")


class SelfTestFile:
    """An open file of records, to which more are added; this process has it to itself."""

    def __init__(self, path: Path) -> None:
        """Opens or begins it.

        Raises:
            TaskSetError: it can't be written, holds something else, or another self-test has it.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise TaskSetError(
                f"{path} can't be written ({error.filename}: {error.strerror}); name another file"
            ) from error
        try:
            _claim(path, self._file)
            self.records, whole = _read(path, path.read_bytes())
            # What follows the last whole line never counted.
            os.ftruncate(self._file, whole)
        except BaseException:
            self.close()
            raise

    def known(self, task_id: str, digest: str, repeat: int, judge: str) -> Record | None:
        """The record of the very same task by the same code, tested at least so often.

        Never one of a fault.
        """
        record = self.records.get(task_id)
        if record is None or record.repeat < repeat:
            return None
        if (record.digest, record.judge) != (digest, judge):
            return None
        return None if record.decision.outcome is Outcome.FAULT else record

    def add(self, record: Record) -> None:
        """Adds a record; it is on disk when this returns."""
        write_line(self._file, record.to_json())
        self.records[record.task_id] = record

    def close(self) -> None:
        """Closes it."""
        os.close(self._file)


def _claim(path: Path, file: int) -> None:
    """Locks the file; the kernel frees it when the process dies, however it dies."""
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise TaskSetError(f"{path} is no plain file; name one for the records")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise TaskSetError(
            f"{path} is in use by {_holder(found.st_ino)}; wait for its end, or name "
            "another file for the records"
        ) from error


def _holder(inode: int) -> str:
    """Who has locked the file with this number, as far as the kernel tells."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        lines = []
    for kind, pid, place in ((f[1], f[4], f[5]) for f in map(str.split, lines) if len(f) > 5):
        if kind == "FLOCK" and place.endswith(f":{inode}") and int(pid) > 0:
            return f"another self-test (process {pid})"
    return "another self-test"
