"""Figures of arrived groups and of a step's batch. Names and units: docs/metrics.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from rollout_engine.types import Attempt, Decision, FinishedGroup, Outcome

from grpo_trainer.core.groups import Ages, TrainableGroup


@dataclass(slots=True)
class ArrivalWindow:
    """What arrived and was decided since the last step."""

    attempts: list[Attempt] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def arrived(self, finished: FinishedGroup) -> None:
        """Count a group that was accepted."""
        self.attempts.extend(finished.attempts)
        self.counts["groups_arrived"] += 1
        for attempt in finished.attempts:
            self.counts[f"outcome.{attempt.outcome.value}"] += 1
            if attempt.limit is not None:
                self.counts[f"limit.{attempt.limit.value}"] += 1
        for faulted in finished.faulted_tries:
            self.counts["faulted_tries"] += 1
            self.counts[f"fault.{faulted.fault.stage.value}.{faulted.fault.cause.value}"] += 1
        if finished.quarantined is not None:
            self.counts["tasks_quarantined"] += 1

    def decided(self, decision: Decision) -> None:
        """Count a decision."""
        self.counts[f"decision.{decision.value}"] += 1

    def values(self) -> dict[str, float]:
        """Means and quantiles over the window; only those that exist."""
        values = {}
        valid = [attempt for attempt in self.attempts if attempt.outcome.valid]
        if valid:
            values["reward.mean"] = float(np.mean([attempt.reward for attempt in valid]))
            values["reward.pass_rate"] = float(np.mean([a.reward >= 1 for a in valid]))
            values |= _spread("tokens", [attempt.tokens for attempt in valid])
            values |= _spread("sampled_tokens", [attempt.sampled_tokens for attempt in valid])
            values |= _spread("turns", [attempt.turns for attempt in valid])
            values |= _spread("duration", [attempt.timing.total_s for attempt in valid])
            if values["duration.max"] > 0:
                values["duration.tail_ratio"] = 1 - values["duration.p90"] / values["duration.max"]
            values["rate.limit"] = float(
                np.mean([attempt.outcome is Outcome.LIMIT_REACHED for attempt in valid])
            )
        faulted = self.counts["faulted_tries"]
        if valid or faulted:
            values["rate.fault"] = faulted / (len(valid) + faulted)
        decided = sum(n for name, n in self.counts.items() if name.startswith("decision."))
        if decided:
            values["rate.skip"] = self.counts[f"decision.{Decision.NO_VARIANCE.value}"] / decided
        return values


def _spread(name: str, numbers: Sequence[float]) -> dict[str, float]:
    middle, high = np.percentile(numbers, [50, 90])
    return {
        f"{name}.p50": float(middle),
        f"{name}.p90": float(high),
        f"{name}.max": float(max(numbers)),
    }


def batch_counts(
    groups: Sequence[TrainableGroup], found: Sequence[Ages], *, bound: int
) -> dict[str, int]:
    """Count what a step trains: attempts by staleness and validity, tokens left out as stale."""
    counts: Counter[str] = Counter(groups_trained=len(groups), faults_trained=0)
    for group, age in zip(groups, found, strict=True):
        counts["tokens_stale"] += age.masked
        # Counted from what is handed to the update, not from how it was chosen.
        counts["faults_trained"] += sum(not a.attempt.outcome.valid for a in group.attempts)
        for oldest in _oldest_trained(group, age, bound):
            counts[f"staleness.{oldest}"] += 1
    return dict(counts)


def staleness_values(
    groups: Sequence[TrainableGroup], found: Sequence[Ages], *, bound: int
) -> dict[str, float]:
    """Give the mean and largest staleness of trained attempts, and the mean of trained tokens."""
    oldest = [
        step
        for group, age in zip(groups, found, strict=True)
        for step in _oldest_trained(group, age, bound)
    ]
    tokens = [
        ages[sequence.sampled]
        for group, age in zip(groups, found, strict=True)
        for attempt, by_sequence in zip(group.attempts, age.by_attempt, strict=True)
        for sequence, ages in zip(attempt.sequences, by_sequence, strict=True)
    ]
    flat = np.concatenate(tokens) if tokens else np.zeros(0, np.int64)
    trained = flat[flat <= bound]
    return {
        "staleness.mean": float(np.mean(oldest)) if oldest else 0.0,
        "staleness.max": float(max(oldest, default=0)),
        "staleness.token_mean": float(trained.mean()) if len(trained) else 0.0,
    }


def _oldest_trained(group: TrainableGroup, age: Ages, bound: int) -> list[int]:
    """Give the age of the oldest trained token of each attempt that has any."""
    oldest = []
    for attempt, by_sequence in zip(group.attempts, age.by_attempt, strict=True):
        trained = [
            ages[sequence.sampled & (ages <= bound)]
            for sequence, ages in zip(attempt.sequences, by_sequence, strict=True)
        ]
        found = [int(ages.max()) for ages in trained if len(ages)]
        if found:
            oldest.append(max(found))
    return oldest
