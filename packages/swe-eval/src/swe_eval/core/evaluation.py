"""An evaluation as values: its plan, what was scored, what is left to assign, and its report.

Attempts that end as FAULT or CANCELLED are never counted. A task whose group lacks valid attempts
is assigned again under the next epoch a configured number of times, then left out and named.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from swe_eval.core.statistics import Interval, TaskScore, mean_pass_at_k, pass_at_k_interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What an evaluation measures; the same name always stands for the same plan."""

    name: str
    task_set: str
    task_ids: tuple[str, ...]
    strata: tuple[str, ...]
    """The stratum of each task, in the same order."""
    stratified_by: tuple[str, ...]
    """The columns of the tasks that make a stratum."""
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
        lists = {name: tuple(values[name]) for name in ("task_ids", "strata", "stratified_by")}
        return cls(**{**values, **lists})

    def differences(self, other: "Plan") -> list[str]:
        """Which settings differ, as `name: mine, not theirs`; lists of tasks by their digest."""
        mine, theirs = self.to_json(), other.to_json()
        return [
            f"{key} is {mine[key]!r}, not {theirs[key]!r}"
            for key in mine
            if key not in {"task_ids", "strata"} and mine[key] != theirs[key]
        ]


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class VersionTokens:
    """Sampled tokens by the version of the weights, and the oldest one in their KV cache."""

    version: int
    oldest_kv_version: int
    tokens: int


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
    faults: Mapping[str, int] = field(default_factory=dict)
    """Tries that ended as FAULT, made again or not, by `STAGE/CAUSE`."""
    version_tokens: tuple[VersionTokens, ...] = ()
    """Of the attempts that count."""
    problem: str = ""
    """Why the group is incomplete; empty when all its attempts are valid."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the journal."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "GroupScore":
        """The inverse of `to_json`."""
        tokens = tuple(VersionTokens(**entry) for entry in values["version_tokens"])
        return cls(**{**values, "version_tokens": tokens})


@dataclass(frozen=True, kw_only=True, slots=True)
class Stratum:
    """pass@1 of the tasks of one stratum."""

    name: str
    tasks: int
    attempts: int
    pass_rate: float
    ci95: Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class PassAtK:
    """The unbiased estimate for k attempts."""

    k: int
    estimate: float
    ci95: Interval


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
    pass_at: tuple[PassAtK, ...]
    """For k from 1 to the attempts that every scored task has; nan without tasks."""
    tasks: int
    """Tasks scored."""
    attempts: int
    """Attempts at each task."""
    outcomes: Mapping[str, int]
    strata: tuple[Stratum, ...]
    stratified_by: tuple[str, ...]
    pinned_version: int
    """0: none was demanded, and the figures are no checkpoint's score."""
    version_tokens: tuple[VersionTokens, ...]
    list_digest: str
    wall_s: float
    by_task: tuple[TaskScore, ...]
    quarantined: tuple[QuarantinedTask, ...]
    faults: Mapping[str, int]

    @property
    def pass_at_1(self) -> float:
        """Mean over tasks of the share of attempts solved."""
        return self.pass_at[0].estimate

    @property
    def pass_at_1_ci95(self) -> Interval:
        """Its interval."""
        return self.pass_at[0].ci95

    @property
    def pass_at_k(self) -> float:
        """For as many attempts as every scored task has."""
        return self.pass_at[-1].estimate

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions that sampled tokens, rising."""
        return tuple(sorted({entry.version for entry in self.version_tokens}))


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
            faults=self._faults().total(),
        )

    def _faults(self) -> Counter[str]:
        incomplete = (score for scores in self._incomplete.values() for score in scores)
        faults: Counter[str] = Counter()
        for score in (*self._scored.values(), *incomplete):
            faults.update(score.faults)
        return faults

    def report(self, *, wall_s: float, seed: int = 0, resamples: int = 10_000) -> Report:
        """The figures over all scored tasks."""
        plan = self.plan
        by_task = tuple(
            TaskScore(task_id=task_id, solved=score.solved, attempts=score.valid)
            for task_id in plan.task_ids
            if (score := self._scored.get(task_id)) is not None
        )
        outcomes: Counter[str] = Counter()
        for group in self._scored.values():
            outcomes.update(group.outcomes)
        faults = self._faults()
        if faults:
            outcomes["FAULT"] = faults.total()
        interval = partial(pass_at_k_interval, seed=seed, resamples=resamples)
        # Every group has at least the plan's attempts, and pass@k needs k of each.
        most = min((score.attempts for score in by_task), default=1)
        return Report(
            name=plan.name,
            pass_at=tuple(
                PassAtK(k=k, estimate=mean_pass_at_k(by_task, k), ci95=interval(by_task, k))
                for k in range(1, most + 1)
            ),
            tasks=len(by_task),
            attempts=plan.attempts,
            outcomes=dict(sorted(outcomes.items())),
            strata=_strata(plan, by_task, interval),
            stratified_by=plan.stratified_by,
            pinned_version=plan.version,
            version_tokens=sum_tokens(
                entry for group in self._scored.values() for entry in group.version_tokens
            ),
            list_digest=plan.list_digest,
            wall_s=wall_s,
            by_task=by_task,
            quarantined=tuple(
                QuarantinedTask(task_id=task_id, reason=self._quarantined[task_id])
                for task_id in plan.task_ids
                if task_id in self._quarantined
            ),
            faults=dict(sorted(faults.items())),
        )


def sum_tokens(entries: Iterable[VersionTokens]) -> tuple[VersionTokens, ...]:
    """One entry for each pair of versions, rising."""
    tokens: Counter[tuple[int, int]] = Counter()
    for entry in entries:
        tokens[entry.version, entry.oldest_kv_version] += entry.tokens
    return tuple(
        VersionTokens(version=version, oldest_kv_version=oldest, tokens=count)
        for (version, oldest), count in sorted(tokens.items())
    )


def _strata(
    plan: Plan,
    by_task: Iterable[TaskScore],
    interval: Callable[[Sequence[TaskScore], int], Interval],
) -> tuple[Stratum, ...]:
    stratum_of = dict(zip(plan.task_ids, plan.strata, strict=True))
    grouped: dict[str, list[TaskScore]] = {}
    for score in by_task:
        grouped.setdefault(stratum_of[score.task_id], []).append(score)
    return tuple(
        Stratum(
            name=name,
            tasks=len(scores),
            attempts=sum(score.attempts for score in scores),
            pass_rate=mean_pass_at_k(scores, 1),
            ci95=interval(scores, 1),
        )
        for name, scores in sorted(grouped.items())
    )
