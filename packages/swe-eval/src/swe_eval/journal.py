"""What an evaluation has scored, one JSON object a line, so that it can be resumed by name.

Lines: the plan; then for each life a `life` with its number; then `score`s, each synced to disk
before the engine is told that it may drop the group. A last line that was cut off by a crash is
ignored.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from service_kit.errors import AlreadyExists, DataLoss, InvalidArgument, Reason, service_error

from swe_eval.core.evaluation import GroupScore, Plan

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_name(name: str) -> str:
    """Raises `InvalidArgument` unless `name` can name an evaluation and its file."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"evaluation name {name!r}: use 1 to 100 letters, digits, '.', '_' and '-', and begin "
            "with a letter or digit"
        )
    return name


@dataclass
class Journal:
    """An open journal.

    Attributes:
        plan: What the evaluation measures.
        identity: Of this journal; an engine that remembers an older one of the same name must not
            take its groups for this one's.
        life: Rises each time the evaluation is taken up.
        delivered: Scores of earlier lives, each with the rollout target that delivered it.
        cursors: Of the last group received from each rollout target.
        spent_s: Wall time of earlier lives.
    """

    path: Path
    plan: Plan
    identity: str = ""
    life: int = 1
    delivered: list[tuple[GroupScore, str]] = field(default_factory=list)
    cursors: dict[str, int] = field(default_factory=dict)
    spent_s: float = 0.0
    _file: int = -1

    @property
    def scores(self) -> list[GroupScore]:
        """Recorded in earlier lives."""
        return [score for score, _ in self.delivered]

    @classmethod
    def open(
        cls, folder: Path, plan: Plan, *, new_identity: Callable[[], str] = lambda: uuid4().hex[:8]
    ) -> "Journal":
        """Opens the journal of `plan.name`, or begins it.

        Raises:
            AlreadyExists: it belongs to another plan.
            DataLoss: it can't be read.
            ServiceError: the disk is full, or not writable.
        """
        path = folder / f"{check_name(plan.name)}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            content = path.read_bytes() if path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            journal = cls._read(path, whole, plan)
            journal._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            # What follows the last whole line never counted.
            os.ftruncate(journal._file, len(whole))
            os.lseek(journal._file, 0, os.SEEK_END)
            if not whole:
                journal.identity = new_identity()
                journal._write({"plan": plan.to_json(), "identity": journal.identity})
            journal._write({"life": journal.life})
        except OSError as error:
            raise disk_error(path, error) from error
        return journal

    @classmethod
    def _read(cls, path: Path, content: bytes, plan: Plan) -> "Journal":
        journal = cls(path=path, plan=plan)
        elapsed_s = 0.0
        for number, line in enumerate(content.splitlines(), 1):
            try:
                entry = json.loads(line)
                if "plan" in entry:
                    _demand_same(Plan.from_json(entry["plan"]), plan)
                    journal.identity = str(entry["identity"])
                elif "life" in entry:
                    journal.life = int(entry["life"]) + 1
                    journal.spent_s += elapsed_s
                    elapsed_s = 0.0
                else:
                    target = str(entry["target"])
                    journal.delivered.append((GroupScore.from_json(entry["score"]), target))
                    journal.cursors[target] = int(entry["cursor"])
                    elapsed_s = float(entry["elapsed_s"])
            except (ValueError, KeyError, TypeError) as error:
                raise DataLoss(
                    f"{path}, line {number} can't be read ({error}); remove the file to begin "
                    "anew, or use another evaluation name"
                ) from error
        journal.spent_s += elapsed_s
        return journal

    def append(self, score: GroupScore, *, target: str, cursor: int, elapsed_s: float) -> None:
        """Records a score; it is on disk when this returns.

        Args:
            score: The group's result.
            target: The rollout-engine that delivered it.
            cursor: Of the delivery.
            elapsed_s: Since this life began.
        """
        try:
            self._write(
                {
                    "score": score.to_json(),
                    "target": target,
                    "cursor": cursor,
                    "elapsed_s": round(elapsed_s, 3),
                }
            )
        except OSError as error:
            raise disk_error(self.path, error) from error
        self.cursors[target] = cursor

    def _write(self, entry: Mapping[str, Any]) -> None:
        write_line(self._file, entry)

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def write_line(file: int, entry: Mapping[str, Any]) -> None:
    """Appends an object as a line to an open file; it is on disk when this returns."""
    data = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
    while data:
        data = data[os.write(file, data) :]
    os.fsync(file)


def _demand_same(recorded: Plan, asked: Plan) -> None:
    differences = recorded.differences(asked)
    if differences:
        raise AlreadyExists(
            f"evaluation {asked.name!r} was begun with other settings: {'; '.join(differences)}; "
            "ask for the same, or use another name"
        )


def disk_error(path: Path, error: OSError) -> Exception:
    """What to raise when an evaluation's files can't be written."""
    return service_error(
        Reason.DISK_FULL,
        f"can't write {path}: {error.strerror}; free some space or set evaluation.state_dir",
    )
