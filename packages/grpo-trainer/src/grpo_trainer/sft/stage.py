"""Supervised fine-tuning on trajectories, step by step, resumable at any checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rollout_engine.agents.template import ChatTemplate
from rollout_engine.errors import TemplateError

from grpo_trainer.backends.base import TrainerBackend, WeightedSequence
from grpo_trainer.config import SftConfig
from grpo_trainer.core.batching import length_buckets
from grpo_trainer.core.schedule import rate_scale
from grpo_trainer.errors import Stalled, TraceError
from grpo_trainer.events import EventKind
from grpo_trainer.sft.render import render
from grpo_trainer.sft.traces import read_traces
from grpo_trainer.stage import StageContext, StageState

MAX_REFUSED_UPDATES = 3


def load_sequences(
    config: SftConfig, template: ChatTemplate, *, context_tokens: int
) -> tuple[list[WeightedSequence], str]:
    """Read and render the traces of a recipe. Blocks.

    Returns:
        The sequences, and a sentence on what was left out; empty if nothing was.

    Raises:
        TraceError: A trace is not valid, or none is left.
    """
    limit = config.max_tokens or context_tokens
    kept: list[WeightedSequence] = []
    unsolved = long = 0
    for trace in read_traces(config.traces):
        if config.max_traces and len(kept) == config.max_traces:
            break
        if config.successes_only and trace.solved is not True:
            unsolved += 1
            continue
        try:
            sequence = render(
                trace,
                template,
                observation_weight=config.observation_weight,
                prompt_weight=config.prompt_weight,
            )
        except TemplateError as error:
            raise TraceError(f"{trace.source}: {error}") from error
        if len(sequence.token_ids) > limit:
            long += 1
            continue
        kept.append(sequence)
    if not kept:
        raise TraceError(
            f"{[str(file) for file in config.traces]}: no trajectory to train on is left "
            f"({unsolved} not marked as solved, {long} longer than {limit} tokens)"
        )
    left_out = f"left out {unsolved} traces not marked as solved and {long} longer than {limit}"
    return kept, left_out if unsolved or long else ""


class SftStage:
    """One supervised stage.

    Args:
        context: Its surroundings.
        backend: Weights, with the optimizer begun or loaded.
        config: Its recipe.
        sequences: What it trains on.
        step: Steps done, after a resume.
    """

    def __init__(
        self,
        context: StageContext,
        backend: TrainerBackend,
        config: SftConfig,
        sequences: Sequence[WeightedSequence],
        *,
        step: int = 0,
    ) -> None:
        self._context = context
        self._backend = backend
        self._config = config
        self._sequences = sequences
        self._step = step
        self._lengths = [len(sequence.token_ids) for sequence in sequences]
        self._batches_a_pass = len(self._order(0))
        self._pass = -1
        self._batches: list[list[int]] = []
        self._refused = 0

    @property
    def step(self) -> int:
        """Steps done."""
        return self._step

    @property
    def steps_total(self) -> int:
        """Steps of the whole stage."""
        return self._config.steps or self._batches_a_pass

    async def run(self) -> StageState:
        """Train to the end, or until stopped; the last thing written is a checkpoint."""
        context = self._context
        saved = self._step
        while self._step < self.steps_total and not context.stop.is_set():
            await self._one_step()
            if self._step % self._config.checkpoint.every_steps == 0:
                await self._save()
                saved = self._step
        if saved != self._step or self._step == 0:
            await self._save()
        return StageState.FINISHED if self._step >= self.steps_total else StageState.STOPPED

    async def _one_step(self) -> None:
        config, context = self._config, self._context
        batch = [self._sequences[index] for index in self._batch(self._step)]
        scale = rate_scale(
            self._step,
            self._step / self.steps_total,
            warmup_steps=config.optimizer.warmup_steps,
            decay=config.optimizer.decay,
            floor=config.optimizer.floor,
        )
        began_s = time.perf_counter()
        result = await context.compute(lambda: self._backend.supervised_update(batch, scale=scale))
        elapsed_s = time.perf_counter() - began_s
        self._refused = 0 if result.applied else self._refused + 1
        if self._refused >= MAX_REFUSED_UPDATES:
            raise Stalled(
                f"{self._refused} updates in a row were not finite at step {self._step}; lower the "
                "learning rate, or look for damaged traces"
            )
        self._step += 1
        if result.applied:
            context.policy.stepped()
        values: dict[str, float] = {
            "loss": result.loss,
            "loss.assistant": result.values["assistant_loss"],
            "grad_norm": result.grad_norm,
            "learning_rate_scale": scale,
            "time.actor_update_s": elapsed_s,
            "throughput.tokens_per_s": result.tokens / elapsed_s if elapsed_s > 0 else 0.0,
        }
        counts = {
            "sequences": len(batch),
            "tokens_computed": result.tokens,
            "tokens_trained": result.trained_tokens,
            "updates_refused": int(not result.applied),
            "nonfinite_values": result.nonfinite,
        }
        await context.events.append(
            EventKind.STEP, {"step": self._step, "values": values, "counts": counts}
        )

    async def _save(self) -> None:
        await self._context.save(self._step, self.state(), self._backend.save)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides weights: nothing, for the order is the seed's."""
        return {"sequences": len(self._sequences)}

    def _batch(self, step: int) -> list[int]:
        number, index = divmod(step, self._batches_a_pass)
        if number != self._pass:
            self._pass, self._batches = number, self._order(number)
        return self._batches[index]

    def _order(self, number: int) -> list[list[int]]:
        return length_buckets(
            self._lengths,
            batch_size=self._config.batch_size,
            window=self._config.bucket_batches,
            generator=np.random.default_rng([self._config.seed, number]),
        )
