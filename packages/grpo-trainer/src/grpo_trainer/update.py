"""One optimizer step on a batch of groups: advantages, minibatches, proximal policy, updates.

It blocks, and runs in the trainer's own thread while rollouts go on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from grpo_trainer.backends.base import (
    Floats,
    PolicyAttempt,
    PolicySequence,
    TrainerBackend,
    UpdateResult,
)
from grpo_trainer.config import GrpoConfig
from grpo_trainer.core.batching import minibatches
from grpo_trainer.core.groups import Ages, TrainableGroup
from grpo_trainer.losses import Mismatch, group_advantages, mismatch


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a step did.

    Attributes:
        applied: Whether any update changed the weights.
        values: Figures by name.
        counts: Counts by name.
    """

    applied: bool
    values: Mapping[str, float]
    counts: Mapping[str, int]


@dataclass(slots=True)
class _Clock:
    recompute_s: float = 0.0
    update_s: float = 0.0


def train_step(
    backend: TrainerBackend,
    groups: Sequence[TrainableGroup],
    found: Sequence[Ages],
    config: GrpoConfig,
    generator: np.random.Generator,
    *,
    scale: float,
) -> StepResult:
    """Train on groups that have variance and are within the staleness bound.

    Args:
        backend: Weights and optimizer.
        groups: The batch.
        found: Ages of each group's tokens; those beyond the bound are not trained.
        config: The stage's recipe.
        generator: Of the minibatches.
        scale: Of the learning rate.
    """
    clock = _Clock()
    began_s = time.perf_counter()
    attempts, fresh = _with_advantages(groups, found, config)
    chosen = [index for index, attempt in enumerate(attempts) if attempt.trained_tokens]
    batch = [attempts[index] for index in chosen]
    parts = [
        part
        for _ in range(config.epochs)
        for part in minibatches(len(batch), config.minibatches, generator)
    ]
    reference = _reference(backend, batch, config, clock)
    proximal, sampled_kl = _proximal(backend, batch, parts, config, clock)
    skipped = _clips_around_behaviour(config, sampled_kl, len(parts))
    results = []
    updating_s = time.perf_counter()
    for number, part in enumerate(parts):
        # The weights of the step's start are still held in the first update.
        own = number == 0 and not skipped
        results.append(
            backend.policy_update(
                [batch[index] for index in part],
                config.loss,
                proximal=None if own else [proximal[index] for index in part],
                reference=None if reference is None else [reference[index] for index in part],
                scale=scale,
            )
        )
    clock.update_s = time.perf_counter() - updating_s
    numeric = _fresh_mismatch(batch, [fresh[index] for index in chosen], parts, results)
    elapsed_s = time.perf_counter() - began_s
    values = _values(results, clock, elapsed_s) | {
        "mismatch.kl": numeric.kl,
        "mismatch.max": numeric.max_abs,
        "learning_rate_scale": scale,
        "recompute.skipped": float(skipped),
        "reward.mean_trained": _mean([a.reward for group in groups for a in group.attempts]),
        "advantage.abs_mean": _mean([abs(attempt.advantage) for attempt in batch]),
    }
    if sampled_kl is not None:
        values["recompute.sample_kl"] = sampled_kl
    counts = {
        "attempts_trained": len(batch),
        "tokens_computed": sum(result.tokens for result in results),
        "tokens_trained": sum(result.trained_tokens for result in results),
        "updates": len(results),
        "updates_refused": sum(not result.applied for result in results),
        "nonfinite_values": sum(result.nonfinite for result in results),
        "mismatch_tokens": numeric.tokens,
    }
    return StepResult(any(result.applied for result in results), values, counts)


def _with_advantages(
    groups: Sequence[TrainableGroup], found: Sequence[Ages], config: GrpoConfig
) -> tuple[list[PolicyAttempt], list[NDArray[np.bool_]]]:
    """Give every valid attempt its advantage, and say which of its trained tokens are fresh."""
    members = [attempt for group in groups for attempt in group.attempts]
    index = np.repeat(np.arange(len(groups)), [len(group.attempts) for group in groups])
    advantages = group_advantages(
        torch.tensor([member.reward for member in members], dtype=torch.float64),
        torch.from_numpy(index),
        torch.ones(len(members), dtype=torch.bool),
        kind=config.advantage.kind,
        epsilon=config.advantage.epsilon,
    ).tolist()
    ages = [of_attempt for age in found for of_attempt in age.by_attempt]
    fresh = [of_attempt for age in found for of_attempt in age.fresh]
    bound = config.admission.staleness_bound
    attempts, trained_fresh = [], []
    for member, advantage, age, now in zip(members, advantages, ages, fresh, strict=True):
        sequences = []
        kept = [np.zeros(0, np.bool_)]
        for sequence, of_tokens, exact in zip(member.sequences, age, now, strict=True):
            trained = sequence.sampled & (of_tokens <= bound)
            sequences.append(PolicySequence(sequence.token_ids, trained, sequence.logprobs))
            kept.append(exact[trained])
        attempts.append(PolicyAttempt(tuple(sequences), advantage, config.temperature))
        trained_fresh.append(np.concatenate(kept))
    return attempts, trained_fresh


def _reference(
    backend: TrainerBackend,
    batch: Sequence[PolicyAttempt],
    config: GrpoConfig,
    clock: _Clock,
) -> tuple[Floats, ...] | None:
    if not config.loss.kl_coefficient:
        return None
    began_s = time.perf_counter()
    scores = backend.logprobs(batch, reference=True)
    clock.recompute_s += time.perf_counter() - began_s
    return scores


def _clips_around_behaviour(config: GrpoConfig, sampled_kl: float | None, updates: int) -> bool:
    """Whether the log-probabilities as sampled stand in for the proximal policy's."""
    if config.recompute.mode == "never":
        return True
    if config.recompute.mode == "always" or updates == 1 or sampled_kl is None:
        return False
    return sampled_kl < config.recompute.skip_below_kl


def _proximal(
    backend: TrainerBackend,
    batch: Sequence[PolicyAttempt],
    parts: Sequence[Sequence[int]],
    config: GrpoConfig,
    clock: _Clock,
) -> tuple[list[Floats], float | None]:
    """Score the batch under the weights held now, as far as that is needed.

    Returns:
        Log-probabilities for each attempt, and the KL of the sample that was scored to decide.
    """
    behaviour = [attempt.behaviour for attempt in batch]
    began_s = time.perf_counter()
    sampled_kl = None
    if config.recompute.mode == "auto" and len(parts) > 1:
        stride = max(1, len(batch) // config.recompute.sample_attempts)
        sample = list(range(0, len(batch), stride))[: config.recompute.sample_attempts]
        scores = backend.logprobs([batch[index] for index in sample])
        sampled_kl = _mismatch([behaviour[index] for index in sample], scores).kl
    if _clips_around_behaviour(config, sampled_kl, len(parts)) or len(parts) < 2:
        clock.recompute_s += time.perf_counter() - began_s
        return behaviour, sampled_kl
    # What only the first update uses is scored by that update itself.
    later = sorted({index for part in parts[1:] for index in part})
    scored = backend.logprobs([batch[index] for index in later])
    for index, scores_of_index in zip(later, scored, strict=True):
        behaviour[index] = scores_of_index
    clock.recompute_s += time.perf_counter() - began_s
    return behaviour, sampled_kl


def _mismatch(sampled: Sequence[Floats], scored: Sequence[Floats]) -> Mismatch:
    if not sampled:
        return Mismatch()
    return mismatch(
        torch.from_numpy(np.concatenate(sampled)), torch.from_numpy(np.concatenate(scored))
    )


def _fresh_mismatch(
    batch: Sequence[PolicyAttempt],
    fresh: Sequence[NDArray[np.bool_]],
    parts: Sequence[Sequence[int]],
    results: Sequence[UpdateResult],
) -> Mismatch:
    """Compare engine and trainer at the same version, on the tokens of the first update."""
    if not results:
        return Mismatch()
    sampled, scored = [], []
    for index, scores in zip(parts[0], results[0].logprobs, strict=True):
        sampled.append(batch[index].behaviour[fresh[index]])
        scored.append(scores[fresh[index]])
    return _mismatch(sampled, scored)


def _values(results: Sequence[UpdateResult], clock: _Clock, elapsed_s: float) -> dict[str, float]:
    """Average the updates' figures, weighed by trained tokens; the maxima stay maxima."""
    tokens = max(1, sum(result.trained_tokens for result in results))
    # Plain floats: a figure may be infinite, and numpy would warn.
    share = [result.trained_tokens / tokens for result in results]
    names = sorted({name for result in results for name in result.values})
    values = {
        name: max(result.values.get(name, 0.0) for result in results)
        if name.endswith(".max")
        else float(sum(w * r.values.get(name, 0.0) for w, r in zip(share, results, strict=True)))
        for name in names
    }
    computed = sum(result.tokens for result in results)
    return values | {
        "loss": float(sum(w * r.loss for w, r in zip(share, results, strict=True))),
        "grad_norm": _mean([result.grad_norm for result in results]),
        "time.actor_update_s": elapsed_s - clock.recompute_s,
        "time.logprob_recompute_s": clock.recompute_s,
        "throughput.tokens_per_s": computed / clock.update_s if clock.update_s > 0 else 0.0,
    }


def _mean(numbers: Sequence[float]) -> float:
    return float(np.mean(numbers)) if len(numbers) else 0.0
