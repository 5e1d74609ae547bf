"""An evaluation as values: its plan, what was scored, what is left to assign, and its report.

Attempts that end as FAULT or CANCELLED are never counted. A task whose group lacks valid attempts
is assigned again under the next epoch a configured number of times, then left out and named.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from swe_eval.core.statistics import Interval, TaskScore, mean_pass_at_k, pass_at_1_interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What an evaluation measures; the same name always stands for the same plan."""

    name: str
    task_set: str
    task_ids: tuple[str, ...]
    kinds: tuple[str, ...]
    """The stratum of each task, in the same order."""
    task_seed: int
    attempts: int
    """Valid attempts wanted of each task."""
    version: int
    """The policy version that every token must come from; 0: whatever the engines hold."""
    temperature: float
    top_p: float
    sampling_seed: int
    list_digest: str

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the journal."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Plan":
        """The inverse of `to_json`."""
        lists = {"task_ids": tuple(values["task_ids"]), "kinds": tuple(values["kinds"])}
        return cls(**{**values, **lists})

    def differences(self, other: "Plan") -> list[str]:
        """Which settings differ, as `name: mine, not theirs`; lists of tasks by their digest."""
        mine, theirs = self.to_json(), other.to_json()
        return [
            f"{key} is {mine[key]!r}, not {theirs[key]!r}"
            for key in mine
            if key not in {"task_ids", "kinds"} and mine[key] != theirs[key]
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupScore:
    """What one group of attempts at a task came to."""

    task_id: str
    epoch: int
    solved: int
    valid: int
    """Attempts that count."""
    outcomes: Mapping[str, int] = field(default_factory=dict)
    """Final attempts by outcome, those that do not count included."""
    faulted_tries: int = 0
    """Tries that ended as FAULT, made again or not."""
    versions: tuple[int, ...] = ()
    problem: str = ""
    """Why the group is incomplete; empty when all its attempts are valid."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the journal."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "GroupScore":
        """The inverse of `to_json`."""
        return cls(**{**values, "versions": tuple(values["versions"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Stratum:
    """Pass rate of the tasks of one kind."""

    name: str
    tasks: int
    attempts: int
    pass_rate: float


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantinedTask:
    """A task that is in none of the figures, and why."""

    task_id: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far an evaluation is."""

    attempts_done: int
    attempts_total: int
    solved: int
    faults: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The result of an evaluation."""

    name: str
    pass_at_1: float
    pass_at_1_ci95: Interval
    pass_at_k: float
    tasks: int
    """Tasks scored."""
    attempts: int
    """Attempts at each task; the k of `pass_at_k`."""
    outcomes: Mapping[str, int]
    by_kind: tuple[Stratum, ...]
    versions: tuple[int, ...]
    list_digest: str
    wall_s: float
    by_task: tuple[TaskScore, ...]
    quarantined: tuple[QuarantinedTask, ...]
    faulted_tries: int


class Book:
    """Which tasks are scored, given up, or to be assigned, and under which epoch.

    Each task is in one state: waiting(epoch) -> assigned(epoch) -> scored, or back to
    waiting(epoch + 1) after an incomplete group, or quarantined when no retry is left.
    """

    def __init__(self, plan: Plan, *, retries: int, scores: Iterable[GroupScore] = ()) -> None:
        self.plan = plan
        self._retries = retries
        self._waiting: dict[str, int] = dict.fromkeys(plan.task_ids, 0)
        self._assigned: dict[str, int] = {}
        self._scored: dict[str, GroupScore] = {}
        self._incomplete: dict[str, list[GroupScore]] = {}
        self._quarantined: dict[str, str] = {}
        for score in scores:
            self.record(score)

    @property
    def finished(self) -> bool:
        """Whether every task is scored or given up."""
        return not self._waiting and not self._assigned

    def next_task(self) -> tuple[str, int] | None:
        """Takes the next task to assign and its epoch; None if there is none now."""
        for task_id, epoch in self._waiting.items():
            del self._waiting[task_id]
            self._assigned[task_id] = epoch
            return task_id, epoch
        return None

    def resume(self, task_id: str, epoch: int) -> bool:
        """Notes that an engine still works on a task since an earlier life; False if not wanted."""
        if self._waiting.get(task_id, epoch + 1) > epoch:
            return False
        del self._waiting[task_id]
        self._assigned[task_id] = epoch
        return True

    def release(self, task_id: str) -> None:
        """An engine was lost with the task: it waits again, under the next epoch."""
        epoch = self._assigned.pop(task_id, None)
        if epoch is not None:
            self._waiting[task_id] = epoch + 1

    def wants(self, task_id: str) -> bool:
        """Whether a result of this task would still count."""
        return task_id in self._waiting or task_id in self._assigned

    def record(self, score: GroupScore) -> bool:
        """Takes a group's result. False if it changes nothing: its task is settled or unknown."""
        task_id = score.task_id
        if not self.wants(task_id):
            return False
        if not score.problem:
            self._waiting.pop(task_id, None)
            self._assigned.pop(task_id, None)
            self._scored[task_id] = score
            return True
        known = self._incomplete.setdefault(task_id, [])
        if any(earlier.epoch == score.epoch for earlier in known):
            return False
        known.append(score)
        if len(known) > self._retries:
            self._waiting.pop(task_id, None)
            self._assigned.pop(task_id, None)
            self._quarantined[task_id] = score.problem
        elif self._assigned.get(task_id, score.epoch) <= score.epoch:
            self._assigned.pop(task_id, None)
            self._waiting[task_id] = max(self._waiting.get(task_id, 0), score.epoch + 1)
        return True

    @property
    def progress(self) -> Progress:
        """How far it is. A quarantined task counts as done."""
        plan = self.plan
        done = (len(self._scored) + len(self._quarantined)) * plan.attempts
        return Progress(
            attempts_done=done,
            attempts_total=len(plan.task_ids) * plan.attempts,
            solved=sum(score.solved for score in self._scored.values()),
            faults=self._faulted_tries(),
        )

    def _faulted_tries(self) -> int:
        incomplete = (score for scores in self._incomplete.values() for score in scores)
        return sum(s.faulted_tries for s in (*self._scored.values(), *incomplete))

    def report(self, *, wall_s: float, seed: int = 0, resamples: int = 10_000) -> Report:
        """The figures over all scored tasks."""
        plan = self.plan
        by_task = tuple(
            TaskScore(task_id=task_id, solved=score.solved, attempts=score.valid)
            for task_id in plan.task_ids
            if (score := self._scored.get(task_id)) is not None
        )
        outcomes: Counter[str] = Counter()
        versions: set[int] = set()
        for group in self._scored.values():
            outcomes.update(group.outcomes)
            versions.update(group.versions)
        faulted = self._faulted_tries()
        if faulted:
            outcomes["FAULT"] = faulted
        # Every group has at least the plan's attempts, and pass@k needs k of each.
        k = min((score.attempts for score in by_task), default=1)
        return Report(
            name=plan.name,
            pass_at_1=mean_pass_at_k(by_task, 1),
            pass_at_1_ci95=pass_at_1_interval(by_task, seed=seed, resamples=resamples),
            pass_at_k=mean_pass_at_k(by_task, k),
            tasks=len(by_task),
            attempts=plan.attempts,
            outcomes=dict(sorted(outcomes.items())),
            by_kind=_strata(plan, by_task),
            versions=tuple(sorted(versions)),
            list_digest=plan.list_digest,
            wall_s=wall_s,
            by_task=by_task,
            quarantined=tuple(
                QuarantinedTask(task_id=task_id, reason=self._quarantined[task_id])
                for task_id in plan.task_ids
                if task_id in self._quarantined
            ),
            faulted_tries=faulted,
        )


def _strata(plan: Plan, by_task: Iterable[TaskScore]) -> tuple[Stratum, ...]:
    kind_of = dict(zip(plan.task_ids, plan.kinds, strict=True))
    grouped: dict[str, list[TaskScore]] = {}
    for score in by_task:
        grouped.setdefault(kind_of[score.task_id], []).append(score)
    return tuple(
        Stratum(
            name=name,
            tasks=len(scores),
            attempts=sum(score.attempts for score in scores),
            pass_rate=mean_pass_at_k(scores, 1),
        )
        for name, scores in sorted(grouped.items())
    )
