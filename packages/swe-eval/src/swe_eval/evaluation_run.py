"""One life of an evaluation: the tasks that move between its book, its engines and its journal."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rollout_engine.types import Assignment, Decision, FinishedGroup, GroupKey, Sampling
from service_kit.errors import Unavailable

from swe_eval.config import EvaluationConfig
from swe_eval.core.evaluation import Book
from swe_eval.engines import Consumer, score_group
from swe_eval.journal import Journal, disk_error
from swe_eval.trajectories import TrajectoryStore

logger = logging.getLogger(__name__)

_SETTLE_S = 10.0
_MEET_S = 5.0
_LOOK_S = 0.1


@dataclass(kw_only=True)
class EvaluationRun:
    """One life of an evaluation.

    Attributes:
        book: Which tasks are scored and which are to be assigned.
        journal: Where scores are made safe.
        engines: Consumers by target.
        config: Limits and deadlines.
        clock: Monotonic seconds.
        began: When this life began, on `clock`.
        changed: Set with every recorded group.
        traceparent: W3C trace context of the caller.
        trajectories: Where the trajectories of scored attempts go; None: nowhere.
    """

    book: Book
    journal: Journal
    engines: Mapping[str, Consumer]
    config: EvaluationConfig
    clock: Callable[[], float]
    began: float
    changed: asyncio.Event
    traceparent: str
    trajectories: TrajectoryStore | None = None
    flying: dict[GroupKey, str] = field(default_factory=dict)
    """Groups assigned and not recorded, and the engine that has them."""

    def __post_init__(self) -> None:
        self.moved = asyncio.Condition()
        self.index = {task_id: i for i, task_id in enumerate(self.book.plan.task_ids)}
        self.writing = asyncio.Lock()

    async def until_finished(self) -> None:
        """Runs until every task is scored or given up.

        Raises:
            BaseExceptionGroup: of `ServiceError`s, when engines refuse or can't be reached.
        """
        async with asyncio.TaskGroup() as tasks:
            work = [tasks.create_task(consumer.run()) for consumer in self.engines.values()]
            await self._meet()
            for target, consumer in self.engines.items():
                work.append(tasks.create_task(self._feed(target, consumer)))
                work.append(tasks.create_task(self._collect(target, consumer)))
            work.append(tasks.create_task(self._mind_lost_engines()))
            async with self.moved:
                await self.moved.wait_for(lambda: self.book.finished)
            await self._settle()
            for task in work:
                task.cancel()

    # -- group ids: the evaluation's identity and the task's place in the list

    def _key(self, task_id: str, epoch: int) -> GroupKey:
        plan = self.book.plan
        return GroupKey(f"{plan.name}:{self.journal.identity}:{self.index[task_id]}", epoch)

    def _task_of(self, key: GroupKey) -> str | None:
        prefix = f"{self.book.plan.name}:{self.journal.identity}:"
        number = key.group_id.removeprefix(prefix)
        known = key.group_id.startswith(prefix) and number.isdecimal()
        task_ids = self.book.plan.task_ids
        return task_ids[int(number)] if known and int(number) < len(task_ids) else None

    # -- the life's phases

    async def _meet(self) -> None:
        """Learns what engines still do since an earlier life, and repeats what they may miss."""
        try:
            async with asyncio.timeout(_MEET_S):
                # A consumer has no event for it.
                while not all(c.connected for c in self.engines.values()):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            absent = [t for t, consumer in self.engines.items() if not consumer.connected]
            logger.warning("%s: going on without %s for now", self.book.plan.name, absent)
        for target, consumer in self.engines.items():
            for key in consumer.outstanding:
                task_id = self._task_of(key)
                if task_id is not None and self.book.resume(task_id, key.epoch):
                    self.flying[key] = target
                else:
                    await consumer.withdraw(key, "its task is settled")
        for score, target in self.journal.delivered:
            if target in self.engines:
                key = self._key(score.task_id, score.epoch)
                await self.engines[target].commit(key, Decision.SCORED)

    async def _feed(self, target: str, consumer: Consumer) -> None:
        limit = self.config.groups_in_flight
        while True:
            async with self.moved:
                await self.moved.wait_for(lambda: self._load(target) < limit)
                item = self.book.next_task() if consumer.connected else None
            if item is None:
                # Nothing to assign now, or the engine is away: a lost one's tasks may come back.
                await asyncio.sleep(_LOOK_S)
                continue
            await self._assign(target, consumer, *item)

    def _load(self, target: str) -> int:
        return sum(1 for holder in self.flying.values() if holder == target)

    async def _assign(self, target: str, consumer: Consumer, task_id: str, epoch: int) -> None:
        plan = self.book.plan
        key = self._key(task_id, epoch)
        self.flying[key] = target
        assignment = Assignment(
            key=key,
            task_id=task_id,
            attempts=plan.attempts,
            sampling=Sampling(
                temperature=plan.temperature, top_p=plan.top_p, seed=plan.sampling_seed
            ),
            pin_version=plan.version,
            traceparent=self.traceparent,
        )
        alone = len(self.engines) == 1
        try:
            async with asyncio.timeout(None if alone else self.config.reassign_s):
                await consumer.assign(assignment)
        except TimeoutError:
            self.flying.pop(key, None)
            self.book.release(task_id)

    async def _collect(self, target: str, consumer: Consumer) -> None:
        while True:
            group = await consumer.next_finished()
            self.flying.pop(group.key, None)
            decision = Decision.WITHDRAWN
            if self._task_of(group.key) is not None:
                score = score_group(group, self.book.plan)
                async with self.writing:
                    if self.book.wants(score.task_id):
                        if self.trajectories is not None and not score.problem:
                            # Before the score: what is scored is never without its trajectory.
                            await asyncio.to_thread(self._keep, self.trajectories, group)
                        elapsed_s = self.clock() - self.began
                        await asyncio.to_thread(
                            self.journal.append,
                            score,
                            target=target,
                            cursor=group.cursor,
                            elapsed_s=elapsed_s,
                        )
                        self.book.record(score)
                        decision = Decision.SCORED
            await consumer.receive(group.cursor)
            await consumer.commit(group.key, decision)
            self.changed.set()
            async with self.moved:
                self.moved.notify_all()

    def _keep(self, trajectories: TrajectoryStore, group: FinishedGroup) -> None:
        try:
            trajectories.write(group, position=self.index[group.task_id])
        except OSError as error:
            raise disk_error(self.journal.path.parent, error) from error

    async def _mind_lost_engines(self) -> None:
        """Gives a lost engine's tasks to the others; fails when there is no engine for too long."""
        lost_since: dict[str, float] = {}
        while True:
            await asyncio.sleep(_LOOK_S)
            now = self.clock()
            for target, consumer in self.engines.items():
                if consumer.connected:
                    lost_since.pop(target, None)
                else:
                    lost_since.setdefault(target, now)
            if len(lost_since) == len(self.engines):
                if now - max(lost_since.values()) > self.config.idle_s:
                    raise Unavailable(
                        f"none of {sorted(self.engines)} could be reached for "
                        f"{self.config.idle_s:g} s; start a rollout-engine and evaluate "
                        f"{self.book.plan.name!r} again, it goes on where it stopped"
                    )
                continue
            for target, since in lost_since.items():
                if now - since > self.config.reassign_s:
                    await self._release(target)

    async def _release(self, target: str) -> None:
        for key in [k for k, holder in self.flying.items() if holder == target]:
            task_id = self._task_of(key)
            self.flying.pop(key)
            await self.engines[target].withdraw(key, "its engine was away for too long")
            if task_id is not None:
                self.book.release(task_id)
                logger.warning("%s: %s is lost with %s; assigned again", key, task_id, target)
        async with self.moved:
            self.moved.notify_all()

    async def _settle(self) -> None:
        for target, consumer in self.engines.items():
            for key in consumer.outstanding:
                await consumer.withdraw(key, "the evaluation is over")
            try:
                async with asyncio.timeout(_SETTLE_S if consumer.connected else 0):
                    await consumer.settled()
            except TimeoutError:
                logger.warning("%s has not acknowledged every decision; it keeps groups", target)
