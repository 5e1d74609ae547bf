"""Takes finished groups in: accepts each once, and sees what it is worth."""

from __future__ import annotations

import numpy as np
from rollout_engine.types import Decision, FinishedGroup

from grpo_trainer.core.decisions import LiveGroup, Reception
from grpo_trainer.core.groups import (
    MIN_VALID_ATTEMPTS,
    TrainableAttempt,
    TrainableGroup,
    has_variance,
    tokens_off_lineage,
    valid_attempts,
    with_shuffled_rewards,
)
from grpo_trainer.core.trajectories import MalformedAttempt
from grpo_trainer.flow import GroupFlow
from grpo_trainer.rollouts import Delivery, GroupSource


class Intake:
    """The task that empties the source.

    A group that is worth training waits in `flow.ready`; any other is decided here and now.
    """

    def __init__(self, flow: GroupFlow, source: GroupSource) -> None:
        self._flow = flow
        self._source = source

    async def run(self) -> None:
        """Take in groups without end."""
        while True:
            await self.take(await self._source.next_finished())

    async def take(self, delivery: Delivery) -> None:
        """Take in one group, and return its credit."""
        flow, finished = self._flow, delivery.group
        flow.last_arrival_s = flow.context.clock()
        key, engine = finished.key, delivery.engine
        reception = flow.book.deliver(key, finished.task_id, engine, finished.cursor)
        if reception is Reception.ACCEPTED:
            group = flow.book.find(key)
            assert group is not None
            flow.arrived(group)
            await self._judge(group, finished)
        elif reception is Reception.DECIDED:
            verdict = flow.book.durable((key, engine))
            if verdict is not None:
                await self._source.commit(engine, key, verdict.decision, verdict.step)
        await self._source.receive(engine, finished.cursor)
        await flow.changed()

    async def _judge(self, group: LiveGroup, finished: FinishedGroup) -> None:
        flow = self._flow
        flow.window.arrived(finished)
        if finished.quarantined is not None:
            flow.curriculum.quarantine(finished.task_id)
            await flow.context.note(
                f"task {finished.task_id} is quarantined: its attempts keep faulting, last in "
                f"{finished.quarantined.stage.value} by {finished.quarantined.cause.value}: "
                f"{finished.quarantined.message}"
            )
        try:
            attempts = valid_attempts(finished)
        except MalformedAttempt as error:
            await flow.context.note(f"group {group.key} is refused: {error}")
            flow.decide(group, Decision.REFUSED)
            return
        solved = sum(attempt.reward >= 1 for attempt in attempts)
        flow.curriculum.record(finished.task_id, solved=solved, attempts=len(attempts))
        flow.window.counts["tokens_off_lineage"] += tokens_off_lineage(
            attempts, flow.context.policy.lineage
        )
        self._sort(group, finished, attempts)

    def _sort(
        self, group: LiveGroup, finished: FinishedGroup, attempts: tuple[TrainableAttempt, ...]
    ) -> None:
        flow = self._flow
        if len(attempts) < MIN_VALID_ATTEMPTS:
            flow.decide(group, Decision.REFUSED)
            return
        if flow.config.shuffle_rewards:
            # Seeded by the group, so that a group delivered again is dealt the same.
            generator = np.random.default_rng([flow.config.seed, group.ordinal])
            attempts = with_shuffled_rewards(attempts, generator)
        if not has_variance(attempts):
            flow.skipped += 1
            flow.decide(group, Decision.NO_VARIANCE)
            return
        flow.ready[group.ordinal] = TrainableGroup(finished, group.ordinal, attempts)
