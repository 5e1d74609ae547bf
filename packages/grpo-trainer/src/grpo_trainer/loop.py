"""The asynchronous GRPO stage: groups come in while steps are computed, and neither waits.

Tasks of a stage, on one event loop:

* placement starts groups as admission allows, and finds each an engine;
* intake takes finished groups, and decides those that are not worth training;
* the step loop takes the oldest groups with variance, trains in the compute thread, publishes the
  new weights at once, and writes a checkpoint now and then;
* after a checkpoint is on disk, engines are told what became of each group.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rollout_engine.types import Decision
from weight_sync.core.manifest import PolicyVersion

from grpo_trainer.backends.base import TrainerBackend
from grpo_trainer.batches import Batch, BatchSelector
from grpo_trainer.commits import Commits
from grpo_trainer.config import GrpoConfig
from grpo_trainer.core.curriculum import Curriculum
from grpo_trainer.core.decisions import Phase
from grpo_trainer.core.figures import ArrivalWindow, batch_counts, staleness_values
from grpo_trainer.core.groups import Ages, TrainableGroup
from grpo_trainer.core.schedule import rate_scale
from grpo_trainer.errors import Stalled
from grpo_trainer.events import EventKind
from grpo_trainer.flow import GroupFlow
from grpo_trainer.intake import Intake
from grpo_trainer.placement import Placement
from grpo_trainer.rollouts import GroupSource
from grpo_trainer.stage import StageContext, StageState
from grpo_trainer.telemetry import Instruments, unix_time_s
from grpo_trainer.update import StepResult, train_step
from grpo_trainer.weights import WeightsPublisher

logger = logging.getLogger(__name__)

SETTLE_S = 10.0
"""Longest wait, at the end of a stage, for engines to acknowledge what they were told."""


@dataclass(slots=True)
class _Timing:
    """Seconds of one step by what they went for."""

    rollout_wait_s: float = 0.0
    weight_sync_s: float = 0.0
    checkpoint_s: float = 0.0


class GrpoStage:
    """One stage of asynchronous GRPO.

    Args:
        context: Its surroundings.
        backend: Weights, with the optimizer begun or loaded.
        config: Its recipe.
        source: Where groups come from.
        publisher: Where new weights go.
        tasks: Ids of the task set, in the order that the curriculum permutes.
        step: Steps done, after a resume.
        state: What `state()` returned at the checkpoint that is resumed; None for a new stage.
        published: Whether this incarnation has published the weights held now.
    """

    def __init__(
        self,
        context: StageContext,
        backend: TrainerBackend,
        config: GrpoConfig,
        *,
        source: GroupSource,
        publisher: WeightsPublisher,
        tasks: Sequence[str],
        step: int = 0,
        state: dict[str, Any] | None = None,
        published: bool = False,
    ) -> None:
        self._context = context
        self._backend = backend
        self._config = config
        self._source = source
        self._publisher = publisher
        self._published = published
        self._generator = np.random.default_rng(config.seed)
        order = config.curriculum
        curriculum = Curriculum(
            tasks,
            seed=order.seed,
            avoid_after=order.avoid_after,
            avoid_passes=order.avoid_passes,
        )
        self._flow = GroupFlow(context, config, curriculum)
        self._refused = 0
        self._worked_s = 0.0
        self._began_s = context.clock()
        self._reported_s = self._began_s
        self._timing = _Timing()
        self._instruments = Instruments()
        self._commits = Commits(source)
        self._selector = BatchSelector(self._flow, source, self._ending)
        if state is not None:
            self._flow.restore(state["flow"], step=step)
            self._generator.bit_generator.state = state["generator"]
            self._worked_s = state["worked_s"]

    @property
    def step(self) -> int:
        """Steps done."""
        return self._flow.step

    @property
    def steps_total(self) -> int:
        """Steps of the whole stage."""
        return self._config.steps

    @property
    def staleness_bound(self) -> int:
        """Optimizer steps between sampling and training, at most."""
        return self._config.admission.staleness_bound

    @property
    def groups_in_flight(self) -> int:
        """Groups at the engines."""
        return self._flow.book.in_flight

    @property
    def groups_ready(self) -> int:
        """Groups that wait for a step."""
        return len(self._flow.ready)

    def state(self) -> dict[str, Any]:
        """Return what a resume needs besides weights and optimizer, as JSON values."""
        return {
            "flow": self._flow.snapshot(),
            "generator": self._generator.bit_generator.state,
            "worked_s": self._elapsed_s(),
        }

    async def run(self) -> StageState:
        """Train to the end, or until stopped; the last thing written is a checkpoint.

        Raises:
            Stalled: Nothing came in for too long, or updates were refused again and again.
            FencedOff, ServiceError: What the engines or weight-sync refuse for good.
        """
        self._began_s = self._reported_s = self._context.clock()
        self._flow.last_arrival_s = self._began_s
        self._flow.pace = self._flow.pace.stepped(self._began_s)
        if not self._published:
            await self._publish()
        await self._checkpoint()
        placement, intake = Placement(self._flow, self._source), Intake(self._flow, self._source)
        try:
            async with asyncio.TaskGroup() as tasks:
                connection = tasks.create_task(self._source.run())
                working = [
                    tasks.create_task(placement.run()),
                    tasks.create_task(placement.watch_engines()),
                    tasks.create_task(intake.run()),
                    tasks.create_task(self._wake_on_stop()),
                ]
                await self._steps()
                for task in working:
                    task.cancel()
                await asyncio.wait(working)
                state = await self._finish()
                connection.cancel()
        finally:
            self._flow.spans.abandon()
        return state

    async def _steps(self) -> None:
        context = self._context
        while self.step < self._config.steps:
            began_s = context.clock()
            batch = await self._selector.next_batch()
            self._timing.rollout_wait_s += context.clock() - began_s
            if batch is None:
                return
            if batch:
                await self._one_step(batch)

    async def _one_step(self, batch: Batch) -> None:
        flow, config = self._flow, self._config
        groups = list(batch.values())
        found = [self._selector.ages(group) for group in groups]
        scale = rate_scale(
            self.step,
            self._progress(),
            warmup_steps=config.optimizer.warmup_steps,
            decay=config.optimizer.decay,
            floor=config.optimizer.floor,
        )
        began_unix_s = unix_time_s()
        flow.begin_step(batch)
        result: StepResult = await self._context.compute(
            lambda: train_step(self._backend, groups, found, config, self._generator, scale=scale)
        )
        if result.applied:
            self._context.policy.stepped()
            await self._publish()
        self._decide(groups, applied=result.applied, began_unix_s=began_unix_s)
        flow.end_step(applied=result.applied)
        flow.pace = flow.pace.stepped(self._context.clock())
        await flow.changed()
        if not result.applied:
            await self._note_refusal(result)
            return
        self._refused = 0
        if self.step % config.checkpoint.every_steps == 0:
            await self._checkpoint()
        await self._report(groups, found, result)

    def _decide(
        self, groups: Sequence[TrainableGroup], *, applied: bool, began_unix_s: float
    ) -> None:
        flow = self._flow
        for group in groups:
            live = flow.book.find(group.finished.key)
            assert live is not None
            if not applied:
                flow.decide(live, Decision.REFUSED)
                continue
            flow.spans.step(
                live.traceparent,
                began_s=began_unix_s,
                step=self.step + 1,
                version=self._context.policy.version,
                attempts=len(group.attempts),
            )
            flow.decide(live, Decision.TRAINED, step=self.step + 1)

    async def _note_refusal(self, result: StepResult) -> None:
        self._refused += 1
        await self._context.note(
            f"the update after step {self.step} was refused: "
            f"{result.counts['nonfinite_values']} values were not finite"
        )
        if self._refused >= self._config.max_refused_updates:
            raise Stalled(
                f"{self._refused} updates in a row were not finite after step {self.step}; lower "
                "the learning rate, or look at the engines' log-probabilities"
            )

    async def _publish(self) -> None:
        """Publish the weights held now; in `sync` mode also wait until every engine has them."""
        context = self._context
        began_s = context.clock()
        newest = context.policy.lineage.newest
        tensors = await context.compute(self._backend.weights)
        version = await self._publisher.publish(
            tensors, step=context.policy.step, parent=0 if newest is None else newest.number
        )
        context.policy.published(version.number)
        self._published = True
        await context.events.append(EventKind.VERSION, version_fields(version))
        if self._config.mode == "sync":
            await self._publisher.await_everywhere(version.number)
        self._timing.weight_sync_s += context.clock() - began_s

    async def _checkpoint(self) -> None:
        """Write a checkpoint, then tell the engines the decisions that it holds."""
        began_s = self._context.clock()
        book = self._flow.book
        self._commits.settle(book)
        held = book.pending
        await self._context.save(self.step, self.state(), self._backend.save)
        await self._commits.tell(book.checkpointed(held))
        self._timing.checkpoint_s += self._context.clock() - began_s

    async def _finish(self) -> StageState:
        """Write the last checkpoint.

        A finished stage gives its open groups up; a stopped one leaves them with the engines, to
        be taken in when it goes on.
        """
        done = self.step >= self._config.steps or self._out_of_time()
        if done:
            await self._withdraw_all()
        await self._checkpoint()
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._source.settled()
        except TimeoutError:
            logger.warning("not every decision is acknowledged; a resume tells them again")
        return StageState.FINISHED if done else StageState.STOPPED

    async def _withdraw_all(self) -> None:
        flow = self._flow
        known = {view.name for view in self._source.engines()}
        for group in flow.book.live:
            flow.decide(group, Decision.WITHDRAWN)
            if group.phase is Phase.ASSIGNED and group.engine in known:
                await self._source.withdraw(group.engine, group.key, "the stage is over")
        for engine in known:
            for key in self._source.held(engine):
                # Given out after the checkpoint that this trainer resumed from.
                if flow.book.give_up(key, engine):
                    await self._source.withdraw(engine, key, "the stage is over")

    async def _report(
        self, groups: Sequence[TrainableGroup], found: Sequence[Ages], result: StepResult
    ) -> None:
        flow, timing, now_s = self._flow, self._timing, self._context.clock()
        bound = self._config.admission.staleness_bound
        values = {
            **result.values,
            **flow.window.values(),
            **staleness_values(groups, found, bound=bound),
            "time.rollout_wait_s": timing.rollout_wait_s,
            "time.weight_sync_s": timing.weight_sync_s,
            "time.checkpoint_s": timing.checkpoint_s,
            "time.step_s": now_s - self._reported_s,
            "groups_in_flight": float(flow.book.in_flight),
            "groups_ready": float(len(flow.ready)),
            "attempts_in_flight": float(self._attempts_in_flight()),
            "policy_step": float(self._context.policy.step),
            "version": float(self._context.policy.version),
            "passes": float(flow.curriculum.passes),
        }
        counts = {
            **result.counts,
            **flow.window.counts,
            **batch_counts(groups, found, bound=bound),
        }
        flow.window = ArrivalWindow()
        self._timing = _Timing()
        self._reported_s = now_s
        self._instruments.stepped(values, counts)
        await self._context.events.append(
            EventKind.STEP, {"step": self.step, "values": values, "counts": counts}
        )

    def _attempts_in_flight(self) -> int:
        """Take the engines' word for it; before they have spoken, that of the book."""
        found = [view.progress for view in self._source.engines()]
        told = [p.attempts_running + p.attempts_queued for p in found if p is not None]
        return sum(told) if told else self._flow.attempts_in_flight

    def _elapsed_s(self) -> float:
        return self._worked_s + self._context.clock() - self._began_s

    def _out_of_time(self) -> bool:
        limit_s = self._config.time_limit_s
        return bool(limit_s) and self._elapsed_s() >= limit_s

    def _ending(self) -> bool:
        return self._context.stop.is_set() or self._out_of_time()

    def _progress(self) -> float:
        by_steps = self.step / self._config.steps
        limit_s = self._config.time_limit_s
        return max(by_steps, self._elapsed_s() / limit_s) if limit_s else by_steps

    async def _wake_on_stop(self) -> None:
        await self._context.stop.wait()
        await self._flow.changed()


def version_fields(version: PolicyVersion) -> dict[str, Any]:
    """Return a version as JSON values, for the event that tells of it."""
    return {
        "run": version.run,
        "incarnation": version.incarnation,
        "number": version.number,
        "step": version.step,
        "parent": version.parent,
        "root_hash": version.root_hash,
    }
