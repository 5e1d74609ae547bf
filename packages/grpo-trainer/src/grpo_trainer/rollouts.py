"""The rollout engines that a stage uses, as one source of finished groups."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import grpc
from rollout_engine.client import ConsumerConfig, GroupConsumer
from rollout_engine.types import Assignment, Decision, FinishedGroup, GroupKey, Progress, Purpose
from service_kit.errors import Unavailable


@dataclass(frozen=True, slots=True)
class EngineView:
    """What is known of an engine now.

    Attributes:
        name: By which checkpoints know it.
        connected: Whether its stream is open.
        silent_s: Since it was last heard, or since the start if it never was.
        outstanding: Groups assigned to it and not arrived.
        progress: Its latest figures.
    """

    name: str
    connected: bool
    silent_s: float
    outstanding: int
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """A finished group and the engine that made it."""

    engine: str
    group: FinishedGroup


class GroupSource(Protocol):
    """Where groups come from. `rollout_engine.client` gives the methods' contracts."""

    async def run(self) -> None:
        """Keep the connections; returns only by cancellation, or fails for good."""
        ...

    def engines(self) -> tuple[EngineView, ...]:
        """Look at every engine."""
        ...

    async def assign(self, engine: str, assignment: Assignment) -> None:
        """Hand a group over; waits for a credit, and until the engine has it on disk."""
        ...

    async def next_finished(self) -> Delivery:
        """Return the next finished group of any engine."""
        ...

    async def receive(self, engine: str, cursor: int) -> None:
        """Return the credit of a group that arrived."""
        ...

    async def commit(self, engine: str, key: GroupKey, decision: Decision, step: int) -> None:
        """Tell what became of a group; repeated until the engine has acknowledged."""
        ...

    def unacknowledged(self, engine: str) -> frozenset[GroupKey]:
        """Return the groups whose commit the engine has not acknowledged."""
        ...

    def held(self, engine: str) -> frozenset[GroupKey]:
        """Return the groups that the engine has and that were not received from it."""
        ...

    async def withdraw(self, engine: str, key: GroupKey, reason: str) -> None:
        """Give a group up."""
        ...

    async def settled(self) -> None:
        """Wait until every commit is acknowledged."""
        ...


class RolloutPool:
    """Streams to several rollout engines, as one consumer.

    Args:
        channels: Of the engines, by name.
        consumer_id: Of the stage, over all its lives.
        incarnation: Of the run's publisher.
        cursors: Where to resume each engine's deliveries.
        config: Heartbeats and reconnection.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        channels: Mapping[str, grpc.aio.Channel],
        *,
        consumer_id: str,
        incarnation: int,
        cursors: Mapping[str, int] | None = None,
        config: ConsumerConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._began_s = clock()
        self._arrived: asyncio.Queue[Delivery] = asyncio.Queue()
        self._consumers = {
            name: GroupConsumer(
                channel,
                consumer_id=consumer_id,
                purpose=Purpose.TRAINING,
                incarnation=incarnation,
                cursor=(cursors or {}).get(name, 0),
                config=config,
                clock=clock,
            )
            for name, channel in channels.items()
        }

    async def run(self) -> None:
        """Keep the streams open.

        Raises:
            ServiceError: An engine refuses this consumer for good, as when a newer trainer runs.
        """
        async with asyncio.TaskGroup() as tasks:
            for name, consumer in self._consumers.items():
                tasks.create_task(consumer.run())
                tasks.create_task(self._pump(name, consumer))

    def engines(self) -> tuple[EngineView, ...]:
        """Look at every engine."""
        now_s = self._clock()
        return tuple(
            EngineView(
                name=name,
                connected=consumer.connected,
                silent_s=now_s - max(self._began_s, consumer.last_contact_s),
                outstanding=len(consumer.outstanding),
                progress=consumer.progress,
            )
            for name, consumer in self._consumers.items()
        )

    async def assign(self, engine: str, assignment: Assignment) -> None:
        """Hand a group over; waits for a credit, and until the engine has it on disk."""
        await self._consumer(engine).assign(assignment)

    async def next_finished(self) -> Delivery:
        """Return the next finished group of any engine."""
        return await self._arrived.get()

    async def receive(self, engine: str, cursor: int) -> None:
        """Return the credit of a group that arrived."""
        await self._consumer(engine).receive(cursor)

    async def commit(self, engine: str, key: GroupKey, decision: Decision, step: int) -> None:
        """Tell what became of a group; repeated until the engine has acknowledged."""
        await self._consumer(engine).commit(key, decision, step)

    def unacknowledged(self, engine: str) -> frozenset[GroupKey]:
        """Return the groups whose commit the engine has not acknowledged."""
        return self._consumer(engine).uncommitted

    def held(self, engine: str) -> frozenset[GroupKey]:
        """Return the groups that the engine has and that were not received from it."""
        return self._consumer(engine).held

    async def withdraw(self, engine: str, key: GroupKey, reason: str) -> None:
        """Give a group up."""
        await self._consumer(engine).withdraw(key, reason)

    async def settled(self) -> None:
        """Wait until every commit is acknowledged."""
        async with asyncio.TaskGroup() as tasks:
            for consumer in self._consumers.values():
                tasks.create_task(consumer.settled())

    async def _pump(self, name: str, consumer: GroupConsumer) -> None:
        while True:
            self._arrived.put_nowait(Delivery(name, await consumer.next_finished()))

    def _consumer(self, engine: str) -> GroupConsumer:
        consumer = self._consumers.get(engine)
        if consumer is None:
            raise Unavailable(
                f"no rollout engine is named {engine!r}; configured are {sorted(self._consumers)}",
                retryable=False,
            )
        return consumer
