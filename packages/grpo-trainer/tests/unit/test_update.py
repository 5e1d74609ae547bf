"""One step on a batch, with a back-end that records what it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpo_trainer.backends.base import Floats, ModelInfo, PolicyAttempt, UpdateResult
from grpo_trainer.backends.torch import TorchBackend
from grpo_trainer.config import GrpoConfig, OptimizerConfig, PolicyLossConfig
from grpo_trainer.core.groups import Ages, TrainableGroup, ages, valid_attempts
from grpo_trainer.core.staleness import Lineage, LineageVersion
from grpo_trainer.testing.models import write_model
from grpo_trainer.update import StepResult, train_step
from rollout_engine.types import (
    Attempt,
    AttemptId,
    FinishedGroup,
    GroupKey,
    Outcome,
    Segment,
    VersionSpan,
)

LINEAGE = Lineage([LineageVersion(1, 0), LineageVersion(2, 1), LineageVersion(3, 2)])


@dataclass
class RecordingBackend:
    """Scores every token `score`; keeps the calls."""

    score: float = -1.0
    calls: list[tuple[str, list[PolicyAttempt], Any]] = field(default_factory=list)

    info = ModelInfo("recording", 1, 61, 512)

    def logprobs(
        self, attempts: Sequence[PolicyAttempt], *, reference: bool = False
    ) -> tuple[Floats, ...]:
        self.calls.append(("reference" if reference else "score", list(attempts), None))
        return tuple(np.full(a.trained_tokens, self.score, np.float32) for a in attempts)

    def policy_update(
        self,
        attempts: Sequence[PolicyAttempt],
        loss: PolicyLossConfig,
        *,
        proximal: Sequence[Floats] | None = None,
        reference: Sequence[Floats] | None = None,
        scale: float = 1.0,
    ) -> UpdateResult:
        self.calls.append(("update", list(attempts), proximal))
        tokens = sum(a.trained_tokens for a in attempts)
        own = tuple(np.full(a.trained_tokens, self.score, np.float32) for a in attempts)
        return UpdateResult(True, 0, 0.1, 1.0, tokens, tokens, {"ratio.max": 1.0}, own)

    def of(self, kind: str) -> list[tuple[list[PolicyAttempt], Any]]:
        return [(attempts, extra) for name, attempts, extra in self.calls if name == kind]


def group(
    ordinal: int, rewards: Sequence[float], *, version: int = 3, logprob: float = -1.0
) -> TrainableGroup:
    key = GroupKey(f"g-{ordinal:06d}", 1)

    def attempt(index: int, reward: float) -> Attempt:
        mask = np.array([False, True, True, False, True])
        logs = np.where(mask, logprob, 0).astype(np.float32)
        spans = (VersionSpan(1, 3, version, version), VersionSpan(4, 5, version, version))
        ids = np.array([10, 20, 21, 11, 22 + index], np.int32)
        segment = Segment(0, -1, ids, mask, logs, spans)
        return Attempt(AttemptId(key, index), "t", Outcome.SOLVED, reward, segments=(segment,))

    attempts = tuple(attempt(i, reward) for i, reward in enumerate(rewards))
    finished = FinishedGroup(key, "t", 1, attempts)
    return TrainableGroup(finished, ordinal, valid_attempts(finished))


def step(
    backend: Any, groups: Sequence[TrainableGroup], *, found: Sequence[Ages] = (), **recipe: Any
) -> StepResult:
    config = GrpoConfig.model_validate({"tasks": ["t"], **recipe})
    bound = config.admission.staleness_bound
    found = found or [ages(g, LINEAGE, step=2, bound=bound) for g in groups]
    return train_step(backend, groups, found, config, np.random.default_rng(0), scale=0.5)


def test_advantages_are_those_of_each_group() -> None:
    backend = RecordingBackend()
    step(backend, [group(0, [1, 0, 0, 0]), group(1, [1, 1])], minibatches=1)
    ((attempts, _),) = backend.of("update")
    found = [attempt.advantage for attempt in attempts]
    assert found[:4] == pytest.approx([3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], rel=1e-4)
    assert found[4:] == [0, 0]


def test_every_attempt_is_in_one_minibatch_of_each_epoch() -> None:
    backend = RecordingBackend()
    groups = [group(ordinal, [1, 0, 1, 0]) for ordinal in range(3)]
    result = step(backend, groups, minibatches=4, epochs=2, recompute={"mode": "always"})
    updates = backend.of("update")
    assert [len(attempts) for attempts, _ in updates] == [3] * 8
    for epoch in (updates[:4], updates[4:]):
        ids = [id(attempt) for attempts, _ in epoch for attempt in attempts]
        assert len(set(ids)) == 12
    assert result.counts["updates"] == 8
    assert result.counts["attempts_trained"] == 12


def test_always_scores_just_what_later_updates_need() -> None:
    backend = RecordingBackend(score=-2.0)
    step(backend, [group(0, [1, 0, 1, 0])], minibatches=2, recompute={"mode": "always"})
    ((scored, _),) = backend.of("score")
    first, second = backend.of("update")
    assert [id(a) for a in scored] == [id(a) for a in second[0]]
    # The first update's weights are those of the step's start: it needs nothing.
    assert first[1] is None
    assert all((proximal == -2.0).all() for proximal in second[1])


def test_never_clips_around_the_behaviour() -> None:
    backend = RecordingBackend(score=-2.0)
    result = step(backend, [group(0, [1, 0, 1, 0])], recompute={"mode": "never"})
    assert backend.of("score") == []
    for attempts, proximal in backend.of("update"):
        assert [p.tolist() for p in proximal] == [a.behaviour.tolist() for a in attempts]
    assert result.values["recompute.skipped"] == 1


@pytest.mark.parametrize(("score", "skipped"), [(-1.001, True), (-1.3, False)])
def test_auto_decides_by_a_sample_scored_before_the_step(score: float, skipped: bool) -> None:
    backend = RecordingBackend(score=score)
    groups = [group(ordinal, [1, 0, 1, 0]) for ordinal in range(4)]
    result = step(backend, groups, recompute={"mode": "auto", "sample_attempts": 4})
    sample = backend.of("score")[0][0]
    assert len(sample) == 4
    assert len({id(attempt) for attempt in sample}) == 4
    assert len(backend.of("score")) == (1 if skipped else 2)
    assert result.values["recompute.skipped"] == float(skipped)
    difference = score + 1.0
    expected = np.expm1(difference) - difference
    assert result.values["recompute.sample_kl"] == pytest.approx(expected, rel=1e-3)


def test_a_single_update_needs_no_scoring_at_all() -> None:
    backend = RecordingBackend()
    step(backend, [group(0, [1, 0])], minibatches=1)
    assert backend.of("score") == []
    assert backend.of("update")[0][1] is None


def test_the_reference_is_scored_only_for_a_kl_term() -> None:
    backend = RecordingBackend()
    step(backend, [group(0, [1, 0])])
    assert backend.of("reference") == []
    step(backend, [group(0, [1, 0])], loss={"kl_coefficient": 0.1})
    assert len(backend.of("reference")) == 1


def test_tokens_beyond_the_bound_are_not_trained_and_count_in_no_figure() -> None:
    backend = RecordingBackend()
    old, new = group(0, [1, 0], version=1), group(1, [1, 0], version=3)
    result = step(backend, [old, new], admission={"staleness_bound": 1}, minibatches=1)
    ((attempts, _),) = backend.of("update")
    assert len(attempts) == 2
    assert result.counts["tokens_trained"] == 6


def test_mismatch_is_measured_on_tokens_of_the_present_version_alone() -> None:
    backend = RecordingBackend(score=-1.2)
    fresh, stale = group(0, [1, 0], logprob=-1.0), group(1, [1, 0], version=2, logprob=-9.0)
    result = step(backend, [fresh, stale], minibatches=1)
    assert result.counts["mismatch_tokens"] == 6
    assert result.values["mismatch.max"] == pytest.approx(0.2, abs=1e-6)


def test_the_same_step_twice_gives_the_same_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", scale=0.05)
    kept = []
    for _ in range(2):
        backend = TorchBackend(folder)
        backend.start_optimizer(OptimizerConfig())
        step(backend, [group(n, [1, 0, 0, 1]) for n in range(3)], recompute={"mode": "always"})
        kept.append({n: np.asarray(t).tobytes() for n, t in backend.weights().items()})
    assert kept[0] == kept[1]


def test_off_policy_tokens_are_corrected_by_the_ratio_to_their_behaviour(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", scale=0.05)
    correction = {"weight": "token", "cap": 2.0}
    results = []
    for logprob in (-4.0, -60.0):
        backend = TorchBackend(folder)
        backend.start_optimizer(OptimizerConfig())
        groups = [group(0, [1, 0], logprob=logprob)]
        results.append(step(backend, groups, minibatches=1, loss={"correction": correction}))
    assert results[0].values["correction.mean"] == pytest.approx(0.9, abs=0.15)
    assert results[1].values["correction.mean"] == pytest.approx(2.0)
