"""A finished group as the trainer sees it: what it is worth, and what of it may be trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rollout_engine.types import Attempt, FinishedGroup

from grpo_trainer.core.staleness import Lineage
from grpo_trainer.core.trajectories import SampledSequence, sampled_sequences

MIN_VALID_ATTEMPTS = 2


@dataclass(frozen=True, slots=True, eq=False)
class TrainableAttempt:
    """A valid attempt and its sequences.

    Attributes:
        attempt: As delivered.
        reward: What the advantage is made of; differs from the attempt's own in the control
            experiment with shuffled rewards.
        sequences: Its paths.
    """

    attempt: Attempt
    reward: float
    sequences: tuple[SampledSequence, ...]

    @property
    def versions(self) -> NDArray[np.int64]:
        """Versions of all its sampled tokens, int64 [sampled tokens]."""
        parts = [sequence.versions[sequence.sampled] for sequence in self.sequences]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class TrainableGroup:
    """A group with at least two valid attempts whose rewards differ."""

    finished: FinishedGroup
    ordinal: int
    attempts: tuple[TrainableAttempt, ...]


def valid_attempts(finished: FinishedGroup) -> tuple[TrainableAttempt, ...]:
    """Take the attempts that the policy ended itself; faults and cancellations are left out.

    Raises:
        MalformedAttempt: One of them contradicts itself.
    """
    return tuple(
        TrainableAttempt(attempt, float(attempt.reward), sampled_sequences(attempt))
        for attempt in finished.attempts
        if attempt.outcome.valid
    )


def has_variance(attempts: Sequence[TrainableAttempt]) -> bool:
    """Whether the rewards differ, so that advantages are not all 0."""
    return len({attempt.reward for attempt in attempts}) > 1


def with_shuffled_rewards(
    attempts: Sequence[TrainableAttempt], generator: np.random.Generator
) -> tuple[TrainableAttempt, ...]:
    """Deal a group's rewards to its attempts at random."""
    rewards = [attempts[index].reward for index in generator.permutation(len(attempts))]
    return tuple(replace(a, reward=reward) for a, reward in zip(attempts, rewards, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Ages:
    """How old a group's sampled tokens are when it is trained.

    Attributes:
        by_attempt: For each attempt and sequence int64 [n]: optimizer steps of sampled tokens, 0
            of others.
        fresh: For each attempt and sequence bool [n]: tokens sampled by the weights held now, all
            of whose context they computed too.
        masked: Sampled tokens that are too old to be trained.
        sampled: All sampled tokens.
    """

    by_attempt: tuple[tuple[NDArray[np.int64], ...], ...]
    fresh: tuple[tuple[NDArray[np.bool_], ...], ...]
    masked: int
    sampled: int


def ages(group: TrainableGroup, lineage: Lineage, *, step: int, bound: int) -> Ages:
    """Measure a group against the weights that would train it now."""
    by_attempt, fresh = [], []
    masked = sampled = 0
    for attempt in group.attempts:
        found, exact = [], []
        for sequence in attempt.sequences:
            age = np.zeros(len(sequence.token_ids), np.int64)
            of_sampled = lineage.staleness(sequence.versions[sequence.sampled], step=step)
            same_cache = (sequence.versions == sequence.kv_versions)[sequence.sampled]
            now = np.zeros(len(sequence.token_ids), np.bool_)
            now[sequence.sampled] = (of_sampled == 0) & same_cache
            exact.append(now)
            age[sequence.sampled] = of_sampled
            masked += int((of_sampled > bound).sum())
            sampled += len(of_sampled)
            found.append(age)
        by_attempt.append(tuple(found))
        fresh.append(tuple(exact))
    return Ages(tuple(by_attempt), tuple(fresh), masked, sampled)


def trainable_within(found: Ages, over_bound: Literal["mask", "drop"]) -> bool:
    """Whether a group of these ages may be trained, wholly or in part."""
    if over_bound == "drop":
        return found.masked == 0
    return found.masked < found.sampled


def tokens_off_lineage(attempts: Sequence[TrainableAttempt], lineage: Lineage) -> int:
    """Count sampled tokens of versions that a crash threw away."""
    return sum(int(lineage.off(attempt.versions).sum()) for attempt in attempts)
