"""The files of an evaluation's folder: what was asked for, the exact list, the result."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from swe_eval import TaskScore, list_digest
from tailrace.eval.v1 import eval_service_pb2 as pb

from tailrace_cli.demo.folder import FolderError, write_json

OPTIONS = "options.json"
TASKS = "tasks.json"
RESULT = "result.json"
TRAJECTORIES = "trajectories"

Bounds = tuple[float, float]


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


D = TypeVar("D", bound=_Document)


class EvaluationOptions(_Document):
    """What to measure, and how."""

    name: str
    """Of the evaluation at the service; the same name resumes it."""
    target: str
    """EvalService that holds the tasks."""
    task_set: str
    tasks: Annotated[int, Field(ge=0)] = 0
    """Size of the sample; 0: all."""
    task_seed: int = 0
    """Of the sample."""
    stratify_by: tuple[str, ...] = ()
    """Columns of the tasks; empty: those of the set."""
    task_ids: tuple[str, ...] = ()
    """The exact list, instead of a sample."""
    attempts: Annotated[int, Field(ge=1)] = 4
    pin: Annotated[int, Field(ge=0)] = 0
    """Weight version that every token must come from; 0: whatever the engines hold."""
    engines: tuple[str, ...] = ()
    """rollout-engines that run the attempts; empty: those that the service is configured with."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    sampling_seed: int = 0

    def to_request(self) -> pb.EvaluateRequest:
        """For `EvalService.Evaluate`."""
        return pb.EvaluateRequest(
            name=self.name,
            task_set=self.task_set,
            tasks=self.tasks,
            task_seed=self.task_seed,
            attempts=self.attempts,
            version=self.pin,
            sampling=pb.EvaluationSampling(
                temperature=self.temperature, top_p=self.top_p, seed=self.sampling_seed
            ),
            rollout_targets=self.engines,
            stratify_by=self.stratify_by,
            task_ids=self.task_ids,
        )


class ListedTask(_Document):
    """A task of the list."""

    task_id: str
    stratum: str


class TaskList(_Document):
    """The exact list of an evaluation, in its order."""

    digest: str
    """SHA-256 of the ids in their order."""
    stratified_by: tuple[str, ...]
    tasks: tuple[ListedTask, ...]

    @classmethod
    def from_plan(cls, plan: pb.EvaluationPlan) -> TaskList:
        """From the service's plan."""
        return cls(
            digest=plan.task_list_digest,
            stratified_by=tuple(plan.stratified_by),
            tasks=tuple(
                ListedTask(task_id=task_id, stratum=stratum)
                for task_id, stratum in zip(plan.task_ids, plan.strata, strict=True)
            ),
        )


class PassAtK(_Document):
    """The unbiased estimate for k attempts."""

    k: int
    estimate: float
    ci95: Bounds


class Stratum(_Document):
    """pass@1 of a stratum."""

    name: str
    tasks: int
    attempts: int
    pass_rate: float
    ci95: Bounds


class ScoredTask(ListedTask):
    """How often a task was solved."""

    solved: int
    attempts: int


class QuarantinedTask(_Document):
    """A task that is in no figure, and why."""

    task_id: str
    reason: str


class VersionTokens(_Document):
    """Sampled tokens by the weights that made them and the oldest in their KV cache."""

    version: int
    oldest_kv_version: int
    tokens: int


class EvaluationResult(_Document):
    """The result of an evaluation."""

    name: str
    task_set: str
    task_list_digest: str
    stratified_by: tuple[str, ...]
    task_seed: int
    attempts: int
    temperature: float
    top_p: float
    pinned_version: int
    """0: none."""
    version_tokens: tuple[VersionTokens, ...]
    listed: int
    """Tasks in the list."""
    tasks: int
    """Tasks scored."""
    pass_at: tuple[PassAtK, ...]
    """Empty when no task could be scored."""
    outcomes: Mapping[str, int]
    faults: Mapping[str, int]
    """Tries that ended as FAULT and were made again, by STAGE/CAUSE; in no figure."""
    strata: tuple[Stratum, ...]
    by_task: tuple[ScoredTask, ...]
    quarantined: tuple[QuarantinedTask, ...]
    wall_s: float

    @classmethod
    def from_report(
        cls, report: pb.EvaluationReport, options: EvaluationOptions, tasks: TaskList
    ) -> EvaluationResult:
        """From the service's report."""
        stratum_of = {task.task_id: task.stratum for task in tasks.tasks}
        return cls(
            name=report.name,
            task_set=options.task_set,
            task_list_digest=report.task_list_digest,
            stratified_by=tuple(report.stratified_by),
            task_seed=options.task_seed,
            attempts=report.attempts,
            temperature=options.temperature,
            top_p=options.top_p,
            pinned_version=report.pinned_version,
            version_tokens=tuple(
                VersionTokens(
                    version=t.version, oldest_kv_version=t.oldest_kv_version, tokens=t.tokens
                )
                for t in report.version_tokens
            ),
            listed=len(tasks.tasks),
            tasks=report.tasks,
            pass_at=tuple(
                PassAtK(k=p.k, estimate=p.estimate, ci95=(p.ci95.low, p.ci95.high))
                for p in report.pass_at
                if report.tasks
            ),
            outcomes=dict(sorted(report.outcomes.items())),
            faults=dict(sorted(report.faults.items())),
            strata=tuple(
                Stratum(
                    name=s.name,
                    tasks=s.tasks,
                    attempts=s.attempts,
                    pass_rate=s.pass_rate,
                    ci95=(s.ci95.low, s.ci95.high),
                )
                for s in report.by_kind
            ),
            by_task=tuple(
                ScoredTask(
                    task_id=t.task_id,
                    stratum=stratum_of[t.task_id],
                    solved=t.solved,
                    attempts=t.attempts,
                )
                for t in report.by_task
            ),
            quarantined=tuple(
                QuarantinedTask(task_id=q.task_id, reason=q.reason) for q in report.quarantined
            ),
            wall_s=report.wall_s,
        )

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions that sampled tokens, rising."""
        return tuple(sorted({entry.version for entry in self.version_tokens}))

    @property
    def claim(self) -> str:
        """What the figures are of. Without a pin they are no checkpoint's."""
        if self.pinned_version:
            return f"the score of policy version {self.pinned_version}"
        found = ", ".join(map(str, self.versions)) or "none"
        return (
            "not a checkpoint's score: no version was pinned, and the tokens came from what the "
            f"engines held (versions {found})"
        )

    @property
    def scores(self) -> list[TaskScore]:
        """By task, for statistics."""
        return [
            TaskScore(task_id=t.task_id, solved=t.solved, attempts=t.attempts) for t in self.by_task
        ]


def save(folder: Path, name: str, document: _Document) -> None:
    """Writes a document atomically."""
    write_json(folder / name, document.model_dump(mode="json"))


def load(folder: Path, name: str, kind: type[D]) -> D:
    """Reads a document of an evaluation's folder.

    Raises:
        FolderError: it is not there, or damaged.
    """
    path = folder / name
    try:
        return kind.model_validate_json(path.read_text())
    except FileNotFoundError as error:
        raise FolderError(
            f"{folder} holds no {'finished ' if name == RESULT else ''}evaluation ({name} is "
            "missing); expected a folder that `tailrace eval` has written"
        ) from error
    except (ValidationError, UnicodeDecodeError, OSError) as error:
        why = _first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise FolderError(f"{path} is damaged: {why}") from error


def read_task_list(path: Path) -> tuple[str, ...]:
    """Task ids from a saved `tasks.json`, or from a text file with one id a line.

    Raises:
        FolderError: it can't be read, names none, or its digest is not that of its tasks.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise FolderError(f"--list: {path} can't be read: {error}") from error
    if not text.lstrip().startswith("{"):
        ids = tuple(line.strip() for line in text.splitlines() if line.strip())
    else:
        try:
            listed = TaskList.model_validate_json(text)
        except ValidationError as error:
            raise FolderError(
                f"--list: {path}: {_first_problem(error)}; expected a tasks.json of `tailrace "
                "eval`, or a text file with one task id a line"
            ) from error
        ids = tuple(task.task_id for task in listed.tasks)
        if list_digest(ids) != listed.digest:
            raise FolderError(
                f"--list: {path} was changed: its tasks have digest {list_digest(ids)}, it says "
                f"{listed.digest}; take the file as it was saved, or one id a line"
            )
    if not ids:
        raise FolderError(f"--list: {path} names no task; expected one id a line")
    return ids


def evaluation_name(folder: Path, stamp: str) -> str:
    """A name that no other evaluation at the service has, from where and when it was begun."""
    stem = "".join(c if c.isascii() and c.isalnum() else "-" for c in folder.name).strip("-")
    unique = hashlib.sha256(f"{folder.resolve()}\0{stamp}".encode()).hexdigest()[:8]
    return f"{(stem or 'eval')[:80]}-{unique}"


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
