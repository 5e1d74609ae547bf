"""A run as its events tell it: the one model behind live view, table, JSON and report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

STAGES = ("base", "sft", "rl")
TIME_SHARES = ("actor_update", "rollout_wait", "logprob_recompute", "weight_sync")


@dataclass(frozen=True)
class Step:
    """Figures of one optimizer step, named as in docs/metrics.md."""

    time_s: float
    step: int
    values: Mapping[str, float]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Stratum:
    """A kind of bug in an evaluation."""

    name: str
    tasks: int
    pass_rate: float


@dataclass(frozen=True)
class Evaluation:
    """Score of one stage's policy on the held-out tasks."""

    pass1: float
    ci95: tuple[float, float]
    tasks: int
    attempts: int
    pass_at_k: float
    outcomes: Mapping[str, int]
    by_kind: tuple[Stratum, ...]
    versions: tuple[int, ...]


@dataclass(frozen=True)
class EvaluationProgress:
    """Attempts of an evaluation so far."""

    done: int
    total: int
    solved: int


@dataclass
class RunRecord:
    """Folded from events; mutable only through `apply`."""

    seed: int = 0
    started_s: float | None = None
    now_s: float = 0.0
    earlier_s: float = 0.0
    """Wall time of the run before it was resumed."""
    stage: str = "starting"
    stage_started_s: float = 0.0
    finished: bool = False
    sft_steps: list[Step] = field(default_factory=list)
    rl_steps: list[Step] = field(default_factory=list)
    steps_total: Mapping[str, int] = field(default_factory=dict)
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    progress: dict[str, EvaluationProgress] = field(default_factory=dict)
    traces: tuple[int, int] = (0, 0)
    groups: tuple[int, int] = (0, 0)
    """In flight, and ready to be trained."""
    notes: list[str] = field(default_factory=list)
    versions: int = 0
    newest_version: int = 0
    scored_versions: dict[str, int] = field(default_factory=dict)
    """Of each stage, the version whose evaluation was begun."""
    cursors: dict[str, int] = field(default_factory=dict)
    """Of each training stage, the last of the trainer's events that is recorded."""
    staleness_bound: int = 0

    def apply(self, event: Mapping[str, Any]) -> None:
        """Folds one event in. Unknown kinds are left alone: a newer version may write them."""
        self.now_s = event["time_s"]
        if "cursor" in event:
            self.cursors[event["stage"]] = event["cursor"]
        handler = getattr(self, f"_on_{event['kind']}", None)
        if handler is not None:
            handler(event)

    @property
    def wall_s(self) -> float:
        """Seconds the run has taken, without the time between a stop and its resume."""
        running = self.now_s - self.started_s if self.started_s is not None else 0.0
        return self.earlier_s + running

    def _on_started(self, event: Mapping[str, Any]) -> None:
        if self.started_s is not None:
            self.earlier_s += self._last_s - self.started_s
        self.seed = event["seed"]
        self.started_s = event["time_s"]
        self.steps_total = event["steps_total"]
        self.staleness_bound = event["staleness_bound"]

    def _on_heartbeat(self, event: Mapping[str, Any]) -> None:
        self._last_s = event["time_s"]

    def _on_stage(self, event: Mapping[str, Any]) -> None:
        self.stage = event["name"]
        self.stage_started_s = event["time_s"]

    def _on_step(self, event: Mapping[str, Any]) -> None:
        step = Step(event["time_s"], event["step"], event["values"], event["counts"])
        steps = self.rl_steps if event["stage"] == "rl" else self.sft_steps
        # After a crash the steps since the last checkpoint are taken again: the later ones count.
        while steps and steps[-1].step >= step.step:
            steps.pop()
        steps.append(step)

    def _on_activity(self, event: Mapping[str, Any]) -> None:
        self.groups = (event["in_flight"], event["ready"])

    def _on_version(self, event: Mapping[str, Any]) -> None:
        self.versions += 1
        self.newest_version = event["number"]

    def _on_evaluation_begun(self, event: Mapping[str, Any]) -> None:
        self.scored_versions[event["name"]] = event["version"]

    def _on_note(self, event: Mapping[str, Any]) -> None:
        self.notes.append(event["text"])

    def _on_traces(self, event: Mapping[str, Any]) -> None:
        self.traces = (event["done"], event["total"])

    def _on_evaluation_progress(self, event: Mapping[str, Any]) -> None:
        self.progress[event["name"]] = EvaluationProgress(
            event["done"], event["total"], event["solved"]
        )

    def _on_evaluation(self, event: Mapping[str, Any]) -> None:
        self.evaluations[event["name"]] = Evaluation(
            pass1=event["pass1"],
            ci95=(event["ci95"][0], event["ci95"][1]),
            tasks=event["tasks"],
            attempts=event["attempts"],
            pass_at_k=event["pass_at_k"],
            outcomes=event["outcomes"],
            by_kind=tuple(Stratum(k["name"], k["tasks"], k["pass_rate"]) for k in event["by_kind"]),
            versions=tuple(event["versions"]),
        )

    def _on_finished(self, event: Mapping[str, Any]) -> None:
        self.finished = True
        self.stage = "finished"

    _last_s: float = 0.0


def fold(events: Iterable[Mapping[str, Any]]) -> RunRecord:
    """The record of a run from all of its events."""
    record = RunRecord()
    for event in events:
        record.apply(event)
    return record


def outcomes(record: RunRecord) -> dict[str, int]:
    """Attempts of the learning stage by outcome name."""
    total: Counter[str] = Counter()
    for step in record.rl_steps:
        for name, count in step.counts.items():
            if name.startswith("outcome."):
                total[name.removeprefix("outcome.")] += count
    return dict(sorted(total.items()))


def staleness_histogram(record: RunRecord) -> dict[int, int]:
    """Trained attempts of the learning stage by staleness in optimizer steps."""
    total: Counter[int] = Counter()
    for step in record.rl_steps:
        for name, count in step.counts.items():
            if name.startswith("staleness."):
                total[int(name.removeprefix("staleness."))] += count
    return dict(sorted(total.items()))


def time_share(record: RunRecord) -> dict[str, float]:
    """Shares of the learning stage's step time, summing to 1 (all 0 without a step)."""
    sums = {
        name: sum(step.values.get(f"time.{name}_s", 0.0) for step in record.rl_steps)
        for name in TIME_SHARES
    }
    total = sum(sums.values())
    return {name: round(s / total, 4) if total else 0.0 for name, s in sums.items()}


def result(record: RunRecord) -> dict[str, Any]:
    """The document that `tailrace demo --json` prints as its last line."""
    histogram = staleness_histogram(record)
    trained = sum(histogram.values())
    return {
        "stages": {
            name: {
                "pass1": round(e.pass1, 4),
                "ci95": [round(bound, 4) for bound in e.ci95],
                "tasks": e.tasks,
                "attempts": e.attempts,
            }
            for name, e in record.evaluations.items()
            if name in STAGES
        },
        "wall_s": round(record.wall_s, 1),
        "steps": record.rl_steps[-1].step if record.rl_steps else 0,
        "outcomes": outcomes(record),
        "faults_trained": sum(s.counts.get("faults_trained", 0) for s in record.rl_steps),
        "staleness": {
            "mean": round(sum(k * n for k, n in histogram.items()) / trained, 3)
            if trained
            else 0.0,
            "max": max(histogram, default=0),
            "bound": record.staleness_bound,
        },
        "time_share": time_share(record),
        "seed": record.seed,
    }


def kinds_improved(record: RunRecord, before: str = "sft", after: str = "rl") -> list[str]:
    """Kinds of bugs that the later policy solves more often."""
    if before not in record.evaluations or after not in record.evaluations:
        return []
    earlier = {k.name: k.pass_rate for k in record.evaluations[before].by_kind}
    later = record.evaluations[after].by_kind
    return [k.name for k in later if k.name in earlier and k.pass_rate > earlier[k.name]]
