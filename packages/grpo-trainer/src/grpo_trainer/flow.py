"""What the tasks of a GRPO stage share: the book of groups and all that hangs on it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any

from rollout_engine.types import Decision, GroupKey

from grpo_trainer.config import GrpoConfig
from grpo_trainer.core.admission import (
    AdmissionRules,
    Outstanding,
    Pace,
    Pipeline,
    count_overdue,
)
from grpo_trainer.core.curriculum import Curriculum
from grpo_trainer.core.decisions import GroupBook, LiveGroup, Phase
from grpo_trainer.core.figures import ArrivalWindow
from grpo_trainer.core.groups import TrainableGroup
from grpo_trainer.stage import StageContext
from grpo_trainer.telemetry import GroupSpans

_SMOOTHING = 0.1


class GroupFlow:
    """State of the groups of one stage, changed by its tasks on one event loop.

    Attributes:
        book: State of every group.
        curriculum: Order of the tasks.
        ready: Groups with variance that wait for a step, by ordinal.
        training: Groups that are being trained.
        to_place: Groups that an engine has to be found for.
        window: What happened since the last step.
        pace: How fast groups are used up.
        step: Steps done.
        skipped: Groups without variance since the last batch.
    """

    def __init__(self, context: StageContext, config: GrpoConfig, curriculum: Curriculum) -> None:
        self.context = context
        self.config = config
        self.curriculum = curriculum
        self.book = GroupBook(f"{context.run}-{context.name}-")
        self.rules = AdmissionRules(
            batch_groups=config.batch_groups,
            staleness_bound=config.admission.staleness_bound,
            max_in_flight=config.admission.max_in_flight_groups,
            pace_headroom=config.admission.pace_headroom,
        )
        self.ready: dict[int, TrainableGroup] = {}
        self.training: dict[int, TrainableGroup] = {}
        self.to_place: deque[GroupKey] = deque()
        self.window = ArrivalWindow()
        self.pace = Pace()
        self.step = 0
        self.skipped = 0
        self.last_arrival_s = context.clock()
        self.spans = GroupSpans()
        self._stepping = False
        self._placed_s: dict[int, float] = {}
        self._typical_s = 0.0
        self._changed = asyncio.Condition()
        self._changes = 0

    @property
    def pipeline(self) -> Pipeline:
        """Where the groups are now."""
        step = self.published_step
        # Without back-fill a skipped group takes its place in the batch like any other.
        skipped = 0 if self.config.backfill else self.skipped
        return Pipeline(
            step=step,
            training=self._stepping,
            in_flight=self.book.in_flight,
            overdue=self._overdue(step),
            ready=self.book.ready - len(self.training) + skipped,
            steps_left=self.config.steps - self.step - self._stepping,
        )

    def _overdue(self, step: int) -> int:
        placed = self._placed_s
        now_s = self.context.clock()
        flying = (
            Outstanding(group.started_step, placed.get(group.ordinal, now_s))
            for group in self.book.live
            if group.phase is Phase.ASSIGNED
        )
        return count_overdue(self.rules, flying, step=step, now_s=now_s, typical_s=self._typical_s)

    @property
    def published_step(self) -> int:
        """Optimizer steps of the newest published weights."""
        newest = self.context.policy.lineage.newest
        return 0 if newest is None else newest.step

    @property
    def attempts_in_flight(self) -> int:
        """Attempts of the groups at the engines."""
        return self.book.in_flight * self.config.group_size

    def placed(self, group: LiveGroup) -> None:
        """Note that an engine has a group from now on."""
        self._placed_s.setdefault(group.ordinal, self.context.clock())

    def arrived(self, group: LiveGroup) -> None:
        """Note that a group is here; how long it took tells what is usual."""
        placed_s = self._placed_s.pop(group.ordinal, None)
        if placed_s is not None:
            took_s = self.context.clock() - placed_s
            usual_s = self._typical_s or took_s
            self._typical_s = usual_s + _SMOOTHING * (took_s - usual_s)

    def begin_step(self, batch: Mapping[int, TrainableGroup]) -> None:
        """Move groups from waiting to being trained."""
        self._stepping = True
        self.training = dict(batch)
        for ordinal in batch:
            del self.ready[ordinal]

    def end_step(self, *, applied: bool) -> None:
        """Note that the batch is decided, and the new weights are out if there are any."""
        self.step += applied
        self._stepping = False
        self.training = {}

    def decide(self, group: LiveGroup, decision: Decision, *, step: int = 0) -> None:
        """Settle a group."""
        self.book.decide(group.key, decision, step=step)
        self.ready.pop(group.ordinal, None)
        self._placed_s.pop(group.ordinal, None)
        self.window.decided(decision)
        self.pace = self.pace.used(1)
        self.spans.end(group.key.group_id, decision)

    def again(self, group: LiveGroup, decision: Decision) -> LiveGroup:
        """End a group's present assignment and have it placed under the next epoch."""
        fresh = self.book.reassign(group.key, decision, step=self.published_step)
        self.ready.pop(group.ordinal, None)
        self._placed_s.pop(group.ordinal, None)
        self.window.decided(decision)
        self.spans.end(group.key.group_id, decision)
        self.to_place.append(fresh.key)
        return fresh

    @property
    def changes(self) -> int:
        """A number that differs after each `changed`."""
        return self._changes

    async def changed(self) -> None:
        """Wake every task that waits for a change."""
        self._changes += 1
        async with self._changed:
            self._changed.notify_all()

    async def wait_changed(self, since: int, *, timeout_s: float | None = None) -> None:
        """Wait until something has changed since `changes` was read, or until the timeout."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._changes != since)
        except TimeoutError:
            return

    def snapshot(self) -> dict[str, Any]:
        """Return what a resume needs, as JSON values."""
        return {
            "book": self.book.snapshot(),
            "curriculum": self.curriculum.snapshot(),
            "skipped": self.skipped,
        }

    def restore(self, snapshot: Mapping[str, Any], *, step: int) -> None:
        """Go on where `snapshot` was taken; every live group is to be placed again."""
        self.book = GroupBook.restore(snapshot["book"])
        self.curriculum.restore(snapshot["curriculum"])
        self.skipped = snapshot["skipped"]
        self.step = step
        self.to_place = deque(group.key for group in self.book.live)
