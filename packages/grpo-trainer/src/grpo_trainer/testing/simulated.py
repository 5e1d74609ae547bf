"""Engines and weight-sync in one process, without a clock: every run of a simulation is the same.

An engine here plays a group with the newest weights the moment it is assigned, and keeps it until
it is committed, over any number of trainers' lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from rollout_engine.types import Assignment, Decision, FinishedGroup, GroupKey
from service_kit.errors import Reason, ServiceError, service_error
from weight_sync.core.manifest import PolicyVersion, TensorEntry, digest, root_hash
from weight_sync.publisher import TensorLike

from grpo_trainer.errors import FencedOff
from grpo_trainer.rollouts import Delivery, EngineView

Play = Callable[[Assignment, Mapping[str, TensorLike], int], FinishedGroup]


class SimulatedWeightSync:
    """Versions that outlive trainers. Acquire a publisher of it for each life."""

    def __init__(self) -> None:
        self.incarnation = 0
        self.versions: list[PolicyVersion] = []
        self.weights: Mapping[str, TensorLike] = {}
        self.awaited: list[int] = []
        """Numbers that someone waited for on every engine."""

    @property
    def number(self) -> int:
        """The newest version's; 0 before the first."""
        return self.versions[-1].number if self.versions else 0

    def acquire(self) -> SimulatedPublisher:
        """Take over publishing."""
        self.incarnation += 1
        return SimulatedPublisher(self, self.incarnation)


@dataclass(slots=True)
class SimulatedPublisher:
    """One incarnation's publisher."""

    service: SimulatedWeightSync
    incarnation: int

    async def publish(
        self, tensors: Mapping[str, TensorLike], *, step: int, parent: int
    ) -> PolicyVersion:
        """Make these weights the newest version."""
        if self.incarnation != self.service.incarnation:
            raise FencedOff(f"incarnation {self.service.incarnation} publishes now")
        entries = [
            TensorEntry(name, "F32", tuple(array.shape), digest(array.tobytes()))
            for name, array in sorted((n, np.asarray(t)) for n, t in tensors.items())
        ]
        version = PolicyVersion(
            run="simulated",
            incarnation=self.incarnation,
            number=self.service.number + 1,
            step=step,
            parent=parent,
            root_hash=root_hash(entries),
        )
        self.service.versions.append(version)
        self.service.weights = tensors
        return version

    async def await_everywhere(self, number: int) -> None:
        """Return at once: the engines are never behind."""
        self.service.awaited.append(number)


@dataclass(slots=True)
class _Kept:
    """A group in an engine's ledger."""

    group: FinishedGroup
    received: bool = False


@dataclass(slots=True)
class SimulatedLedger:
    """What an engine keeps on disk.

    Attributes:
        kept: Finished groups that are not committed.
        committed: What became of the others.
        played: How many groups were played.
    """

    kept: dict[GroupKey, _Kept] = field(default_factory=dict)
    committed: dict[GroupKey, tuple[Decision, int]] = field(default_factory=dict)
    played: int = 0


class SimulatedEngines:
    """A source of groups for one life of a trainer, over ledgers that outlive it.

    Args:
        weight_sync: Whose newest weights groups are played with.
        play: Plays a group.
        ledgers: Of the engines, by name.
        spoil: Changes a group that was played, as to inject faults.

    Attributes:
        held_back: Groups that are played but delivered only by `release`.
        silent: Engines that take nothing, deliver nothing, and count as not connected.
        refuse: Reason to refuse a task with.
    """

    def __init__(
        self,
        weight_sync: SimulatedWeightSync,
        play: Play,
        ledgers: Mapping[str, SimulatedLedger],
        *,
        spoil: Callable[[FinishedGroup], FinishedGroup] = lambda group: group,
    ) -> None:
        self._weight_sync = weight_sync
        self._play = play
        self._ledgers = ledgers
        self._spoil = spoil
        self._arrived: asyncio.Queue[Delivery] = asyncio.Queue()
        self.held_back: set[str] = set()
        self.silent: set[str] = set()
        self.refuse: dict[str, Reason] = {}
        self.assigned: list[tuple[str, Assignment]] = []
        self.withdrawn: list[tuple[str, GroupKey]] = []

    async def run(self) -> None:
        """Do nothing until cancelled."""
        await asyncio.Event().wait()

    def engines(self) -> tuple[EngineView, ...]:
        """Look at every engine."""
        return tuple(
            EngineView(
                name=name,
                connected=name not in self.silent,
                silent_s=1e9 if name in self.silent else 0.0,
                outstanding=sum(not kept.received for kept in ledger.kept.values()),
            )
            for name, ledger in self._ledgers.items()
        )

    async def assign(self, engine: str, assignment: Assignment) -> None:
        """Play a group, or find it in the ledger; deliver it in either case."""
        if engine in self.silent:
            await asyncio.Event().wait()
        self.assigned.append((engine, assignment))
        if assignment.task_id in self.refuse:
            reason = self.refuse[assignment.task_id]
            raise service_error(reason, f"no task {assignment.task_id}")
        ledger = self._ledgers[engine]
        key = assignment.key
        if key in ledger.committed:
            raise ServiceError(f"group {key} is committed", reason=Reason.ALREADY_EXISTS)
        kept = ledger.kept.get(key)
        if kept is None:
            ledger.played += 1
            played = self._play(assignment, self._weight_sync.weights, self._weight_sync.number)
            group = replace(self._spoil(played), cursor=ledger.played)
            kept = ledger.kept[key] = _Kept(group)
        if key.group_id not in self.held_back:
            self._arrived.put_nowait(Delivery(engine, kept.group))

    def release(self, group_id: str) -> None:
        """Deliver a group that was held back."""
        self.held_back.discard(group_id)
        for engine, ledger in self._ledgers.items():
            for key, kept in ledger.kept.items():
                if key.group_id == group_id:
                    self._arrived.put_nowait(Delivery(engine, kept.group))

    def deliver_again(self) -> None:
        """Deliver everything that is not committed, as an engine does after a restart."""
        for engine, ledger in self._ledgers.items():
            for kept in ledger.kept.values():
                self._arrived.put_nowait(Delivery(engine, kept.group))

    async def next_finished(self) -> Delivery:
        """Return the next group."""
        return await self._arrived.get()

    async def receive(self, engine: str, cursor: int) -> None:
        """Return the credit of what arrived up to a cursor."""
        for kept in self._ledgers[engine].kept.values():
            if kept.group.cursor <= cursor:
                kept.received = True

    async def commit(self, engine: str, key: GroupKey, decision: Decision, step: int) -> None:
        """Drop a group, and remember what became of it."""
        ledger = self._ledgers[engine]
        ledger.kept.pop(key, None)
        ledger.committed.setdefault(key, (decision, step))

    def unacknowledged(self, engine: str) -> frozenset[GroupKey]:
        """Return nothing: every commit is heard at once."""
        return frozenset()

    def held(self, engine: str) -> frozenset[GroupKey]:
        """Return the groups that were not received."""
        kept = self._ledgers[engine].kept
        return frozenset(key for key, group in kept.items() if not group.received)

    async def withdraw(self, engine: str, key: GroupKey, reason: str) -> None:
        """Note that a group was given up."""
        self.withdrawn.append((engine, key))

    async def settled(self) -> None:
        """Return at once."""
