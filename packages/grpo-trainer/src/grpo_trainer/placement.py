"""Starts groups when admission says so, and finds each an engine."""

from __future__ import annotations

import asyncio

from rollout_engine.types import Assignment, AttemptLimits, Decision, GroupKey, Sampling
from service_kit.errors import Reason, ServiceError, Unavailable

from grpo_trainer.core.admission import Start, Wait, next_start
from grpo_trainer.core.decisions import LiveGroup, Phase
from grpo_trainer.errors import Stalled
from grpo_trainer.flow import GroupFlow
from grpo_trainer.rollouts import GroupSource

_UNKNOWN_TASK = frozenset({Reason.NOT_FOUND, Reason.INVALID_ARGUMENT})
_SPENT_EPOCH = frozenset({Reason.STALE_EPOCH, Reason.ALREADY_EXISTS, Reason.FAILED_PRECONDITION})
# The engine cannot take the group for now; whoever runs it has to free something.
_NO_ROOM = frozenset(
    {Reason.DISK_FULL, Reason.QUOTA_EXHAUSTED, Reason.UNAVAILABLE, Reason.DRAINING}
)
_NO_ROOM_S = 2.0
_MAX_LOOK_S = 5.0


class Placement:
    """The tasks that start groups and that watch the engines which have them."""

    def __init__(self, flow: GroupFlow, source: GroupSource) -> None:
        self._flow = flow
        self._source = source
        self._told_no_room = False
        limits = flow.config.limits
        self._limits = AttemptLimits(
            turns=limits.turns,
            turn_tokens=limits.turn_tokens,
            total_tokens=limits.total_tokens,
            context_tokens=limits.context_tokens,
            command_time_s=limits.command_time_s,
            repeated_actions=limits.repeated_actions,
        )
        self._sampling = Sampling(
            temperature=flow.config.temperature, top_p=1.0, top_k=0, seed=flow.config.seed
        )

    async def run(self) -> None:
        """Start groups without end, one at a time."""
        flow = self._flow
        while True:
            seen = flow.changes
            if flow.to_place:
                await self.place(flow.to_place.popleft())
                continue
            now_s = flow.context.clock()
            decision = next_start(flow.rules, flow.pipeline, flow.pace, now_s)
            if isinstance(decision, Start):
                await self._start(decision.min_step)
            elif isinstance(decision, Wait):
                await flow.wait_changed(seen, timeout_s=decision.until_s - now_s)
            else:
                # A look now and then: with time, a group in flight can come to count as too slow.
                await flow.wait_changed(seen, timeout_s=_MAX_LOOK_S)

    async def watch_engines(self) -> None:
        """Give the groups of engines that fell silent to others, without end."""
        lost_s = self._flow.config.engine_lost_s
        while True:
            await asyncio.sleep(min(lost_s / 4, _MAX_LOOK_S))
            await self.reassign_lost()

    async def reassign_lost(self) -> None:
        """Give up the groups of engines that are silent for too long, if others are there."""
        flow = self._flow
        waiting = set(flow.to_place)
        for group in flow.book.live:
            if group.phase is Phase.READY or group.key in waiting:
                continue
            if self._is_lost(group.engine):
                flow.again(group, Decision.WITHDRAWN)
                await self._source.withdraw(group.engine, group.key, "its engine fell silent")
                await flow.context.note(
                    f"engine {group.engine} fell silent: group {group.key} is assigned again"
                )
        if flow.to_place:
            await flow.changed()

    async def place(self, key: GroupKey) -> None:
        """Hand a group to an engine; waits for a credit."""
        flow = self._flow
        group = flow.book.find(key)
        if group is None or group.phase is Phase.READY:
            return
        if self._is_lost(group.engine):
            flow.again(group, Decision.WITHDRAWN)
            return
        if not group.traceparent:
            traceparent = flow.spans.begin(key.group_id, group.task_id)
            group = flow.book.trace(key, traceparent)
        engine = self._choose(group)
        flow.book.place(key, engine)
        flow.placed(group)
        try:
            async with asyncio.timeout(flow.config.engine_lost_s):
                await self._source.assign(engine, self._assignment(group))
            self._told_no_room = False
        except TimeoutError:
            await self._not_taken(group)
        except ServiceError as error:
            await self._refused(group, engine, error)

    async def _start(self, min_step: int) -> None:
        flow = self._flow
        min_version = flow.context.policy.lineage.oldest_number_at(min_step)
        try:
            task_id = flow.curriculum.draw()
        except LookupError as error:
            raise Stalled(str(error)) from error
        step = flow.published_step
        group = flow.book.open(task_id, min_version=min_version, step=step)
        # A group that a crash made the book forget may be placed, or here, already.
        if group is None or group.phase is Phase.READY or group.engine:
            return
        flow.pace = flow.pace.started(flow.context.clock())
        await self.place(group.key)

    def _is_lost(self, engine: str) -> bool:
        """Whether an engine is silent for too long, and another could have its groups."""
        views = {view.name: view for view in self._source.engines()}
        view = views.pop(engine, None)
        silent = view is not None and view.silent_s > self._flow.config.engine_lost_s
        return silent and any(other.connected for other in views.values())

    def _choose(self, group: LiveGroup) -> str:
        views = self._source.engines()
        if group.engine in {view.name for view in views}:
            return group.engine
        if not views:
            raise Unavailable("no rollout engine is configured", retryable=False)
        return min(views, key=lambda view: (not view.connected, view.outstanding)).name

    def _assignment(self, group: LiveGroup) -> Assignment:
        return Assignment(
            key=group.key,
            task_id=group.task_id,
            attempts=self._flow.config.group_size,
            sampling=self._sampling,
            limits=self._limits,
            min_version=group.min_version,
            traceparent=group.traceparent,
        )

    async def _not_taken(self, group: LiveGroup) -> None:
        """Go on waiting for a busy engine; leave one that is gone, if there is another."""
        current = self._flow.book.find(group.key)
        if current is None or current.phase is Phase.READY:
            return
        if self._is_lost(current.engine):
            self._flow.again(current, Decision.WITHDRAWN)
            await self._flow.context.note(
                f"engine {current.engine} is silent: group {group.key} is assigned again"
            )
        else:
            self._flow.to_place.appendleft(group.key)

    async def _refused(self, group: LiveGroup, engine: str, error: ServiceError) -> None:
        flow = self._flow
        current = flow.book.find(group.key)
        if current is None or current.phase is Phase.READY:
            return
        if error.reason in _NO_ROOM:
            if not self._told_no_room:
                await flow.context.note(f"engine {engine} takes no group for now: {error.message}")
            self._told_no_room = True
            flow.to_place.append(group.key)
            await flow.wait_changed(flow.changes, timeout_s=_NO_ROOM_S)
            return
        if error.reason in _SPENT_EPOCH:
            flow.again(group, Decision.WITHDRAWN)
            return
        if error.reason in _UNKNOWN_TASK:
            flow.curriculum.quarantine(group.task_id)
            flow.decide(group, Decision.REFUSED)
            await flow.context.note(
                f"engine {engine} refuses task {group.task_id}, which is left out from now on: "
                f"{error.message}"
            )
            return
        raise error
