"""Runs every group of the engine: starts, refills, finishes and cancels, oldest group first."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from service_kit.errors import ServiceError
from service_kit.telemetry import meter

from rollout_engine import wire
from rollout_engine.core.group import GroupState, RefillPolicy, SlotStatus
from rollout_engine.core.limits import with_defaults
from rollout_engine.core.outcome import fault_of
from rollout_engine.core.retry import Backoff
from rollout_engine.errors import LedgerError
from rollout_engine.ledger.rows import EndedTry, GroupRef, ResumedGroup
from rollout_engine.ledger.store import Ledger
from rollout_engine.limiters import Limiter
from rollout_engine.policy import PolicyEngine
from rollout_engine.runner import AttemptRunner
from rollout_engine.turn import AttemptJob
from rollout_engine.types import (
    Assignment,
    Attempt,
    AttemptId,
    AttemptLimits,
    Fault,
    FaultStage,
    Outcome,
    Progress,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

_REMIND_S = 30.0


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    """What holds for every group.

    Attributes:
        limits: Defaults for limits that an assignment leaves open.
        model_context_tokens: Longest context that the model takes; 0: unknown.
        refill: How often faults are refilled.
        refill_backoff: Waits before a refill.
    """

    limits: AttemptLimits
    refill: RefillPolicy
    refill_backoff: Backoff
    model_context_tokens: int = 0


class Signal:
    """Something that happens again and again; whoever waits names what it has seen."""

    def __init__(self) -> None:
        self.count = 0
        self._next = asyncio.Event()

    def happened(self) -> None:
        """Let everybody know."""
        self.count += 1
        self._next.set()
        self._next = asyncio.Event()

    async def after(self, count: int) -> None:
        """Wait until it has happened more often than `count` times."""
        while self.count <= count:
            await self._next.wait()


@dataclass(slots=True)
class _Group:
    """A group that runs."""

    ref: GroupRef
    assignment: Assignment
    limits: AttemptLimits
    sequence: int
    state: GroupState
    running: dict[int, AttemptJob] = field(default_factory=dict)
    sampled: dict[int, int] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Figures:
    """Counts of one consumer since the engine's start."""

    tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    finished: Signal = field(default_factory=Signal)


class Supervisor:
    """Owns the tasks of all groups. `run` has to be running for anything to happen.

    Args:
        attempts: Limits attempts that run at once.
        clock: Monotonic seconds.
        wall_clock: Unix seconds.
        sleep: For tests.
        rng: Jitter of refills.

    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        runner: AttemptRunner,
        policy: PolicyEngine,
        settings: SupervisorSettings,
        attempts: Limiter,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self._ledger = ledger
        self._runner = runner
        self._policy = policy
        self._settings = settings
        self._attempts = attempts
        self._clock = clock
        self._wall_clock = wall_clock
        self._sleep = sleep
        self._rng = rng or random.Random()  # noqa: S311 -- jitter
        self._groups: dict[GroupRef, _Group] = {}
        self._figures: dict[str, _Figures] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._ledger_well = asyncio.Event()
        self._ledger_well.set()
        self.ledger_trouble: LedgerError | None = None
        self.ready = asyncio.Event()
        """Set once `run` has taken up what the ledger remembers."""
        instruments = meter("rollout_engine")
        self._count_attempts = instruments.create_counter(
            "rollout.attempts", unit="{attempt}", description="Ended tries by outcome."
        )
        self._count_tokens = instruments.create_counter(
            "rollout.tokens", unit="{token}", description="Sampled tokens."
        )

    async def run(self) -> None:
        """Go on with what the ledger remembers, then run whatever is started; ends by cancellation.

        Cancelling it cancels every attempt: they are made again in the engine's next life.
        """
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for resumed in self._ledger.recovery.groups:
                self.resume(resumed)
            self.ready.set()
            await asyncio.Event().wait()

    def start(self, ref: GroupRef, assignment: Assignment, sequence: int) -> None:
        """Run a group that the ledger has accepted."""
        self._start(ref, assignment, sequence, GroupState.new(assignment.attempts))

    def resume(self, resumed: ResumedGroup) -> None:
        """Run a group on from where the ledger left it."""
        assignment = wire.assignment_from_bytes(resumed.assignment)
        state = GroupState.recovered(resumed.slots, assignment.attempts)
        self._start(resumed.ref, assignment, resumed.sequence, state)

    async def undivided(self, steps: Coroutine[Any, Any, T]) -> T:
        """Take steps that belong together to their end, whatever becomes of who asked for them.

        A stream that ends between the ledger's step and the supervisor's would else leave a group
        that runs for the one and not for the other.
        """
        if self._tasks is None:
            steps.close()
            raise RuntimeError("the supervisor does not run")
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def take() -> None:
            try:
                result = await steps
            except Exception as error:
                if done.cancelled():
                    logger.warning("steps of a stream that has ended failed: %r", error)
                else:
                    done.set_exception(error)
            else:
                if not done.cancelled():
                    done.set_result(result)

        self._tasks.create_task(take())
        return await done

    async def cancel(self, ref: GroupRef) -> None:
        """Stop a group; returns once its attempts have told engines and sandboxes."""
        group = self._groups.get(ref)
        if group is not None and group.task is not None:
            group.task.cancel()
            await asyncio.wait([group.task])

    def finished(self, consumer_id: str) -> Signal:
        """Give what happens whenever a group of the consumer has finished."""
        return self._of(consumer_id).finished

    def progress(self, consumer_id: str) -> Progress:
        """Give the figures of one consumer."""
        groups = [g for g in self._groups.values() if g.ref.consumer_id == consumer_id]
        jobs = [job for group in groups for job in group.running.values()]
        figures = self._of(consumer_id)
        return Progress(
            groups_running=len(groups),
            attempts_running=len(jobs),
            attempts_queued=sum(len(group.state.pending) for group in groups),
            tokens_generated=figures.tokens,
            outcomes=dict(figures.outcomes),
            oldest_running_version=min(
                (job.oldest_version for job in jobs if job.oldest_version), default=0
            ),
        )

    def outcomes(self) -> dict[str, int]:
        """Count ended tries by outcome, over all consumers."""
        total: Counter[str] = Counter()
        for figures in self._figures.values():
            total += figures.outcomes
        return dict(total)

    def _of(self, consumer_id: str) -> _Figures:
        return self._figures.setdefault(consumer_id, _Figures())

    def _start(
        self, ref: GroupRef, assignment: Assignment, sequence: int, state: GroupState
    ) -> None:
        if self._tasks is None:
            raise RuntimeError("the supervisor does not run")
        settings = self._settings
        limits = with_defaults(assignment.limits, settings.limits, settings.model_context_tokens)
        group = _Group(ref, assignment, limits, sequence, state)
        self._groups[ref] = group
        group.task = self._tasks.create_task(self._run_group(group), name=f"group {ref}")

    async def _run_group(self, group: _Group) -> None:
        try:
            async with asyncio.TaskGroup() as indices:
                for index in group.state.pending:
                    indices.create_task(self._run_index(group, index))
            quarantined = group.state.quarantined
            if quarantined is not None:
                logger.warning(
                    "group %s is quarantined: %d of %d attempts are valid, the last fault was %s",
                    group.ref,
                    group.state.valid,
                    len(group.state.slots),
                    quarantined,
                )
            await self._durably(lambda: self._ledger.finish_group(group.ref, quarantined))
        finally:
            del self._groups[group.ref]
        self._of(group.ref.consumer_id).finished.happened()

    async def _run_index(self, group: _Group, index: int) -> None:
        """Make one try after another until one ends validly or the index is given up."""
        while group.state.slots[index].status is SlotStatus.PENDING:
            faults = group.state.slots[index].faults
            if faults:
                backoff = self._settings.refill_backoff
                await self._sleep(backoff.delay_s(faults, self._rng.random()))
            queued_at_s = self._clock()
            await self._ledger_well.wait()
            gate = await self._gate(group.assignment)
            async with self._attempts.slot((group.sequence, index)):
                queued_s = self._clock() - queued_at_s
                attempt = await self._make_try(group, index, queued_s, gate)
            await self._record(group, attempt)

    async def _gate(self, assignment: Assignment) -> Fault | None:
        """Wait until engines hold the version demanded; a fault if that cannot come any more."""
        if not (assignment.min_version or assignment.pin_version):
            return None
        try:
            await self._policy.await_version(
                minimum=assignment.min_version, exactly=assignment.pin_version
            )
        except ServiceError as error:
            return fault_of(error, FaultStage.GENERATE)
        return None

    async def _make_try(
        self, group: _Group, index: int, queued_s: float, gate: Fault | None
    ) -> Attempt:
        try_number = group.state.slots[index].try_number
        attempt_id = AttemptId(group.ref.key, index, try_number)
        group.state = group.state.leased(index)
        group.sampled[index] = 0
        if gate is not None:
            return Attempt(
                attempt_id,
                group.assignment.task_id,
                Outcome.FAULT,
                fault=gate,
                finished_at_s=self._wall_clock(),
            )
        job = AttemptJob(
            id=attempt_id,
            assignment=group.assignment,
            limits=group.limits,
            sandbox_key=(
                f"{self._ledger.ledger_id[:12]}-{self._ledger.boot}-{group.sequence}-{index}-"
                f"{try_number}"
            ),
            priority=(group.sequence, index),
            queued_s=queued_s,
            on_turn=lambda done: self._note_turn(group, done),
        )
        self._ledger.lease(group.ref, index, try_number, 0, 0)
        group.running[index] = job
        try:
            return await self._runner.run(job)
        except asyncio.CancelledError:
            self._count(group.ref.consumer_id, Outcome.CANCELLED)
            raise
        finally:
            del group.running[index]

    def _note_turn(self, group: _Group, job: AttemptJob) -> None:
        index = job.id.index
        self._ledger.lease(group.ref, index, job.id.try_number, job.turns, job.sampled_tokens)
        new = job.sampled_tokens - group.sampled.get(index, 0)
        group.sampled[index] = job.sampled_tokens
        self._of(group.ref.consumer_id).tokens += new
        self._count_tokens.add(new)

    def _count(self, consumer_id: str, outcome: Outcome) -> None:
        self._of(consumer_id).outcomes[outcome.value] += 1
        self._count_attempts.add(1, {"outcome": outcome.value})

    async def _record(self, group: _Group, attempt: Attempt) -> None:
        index = attempt.id.index
        if attempt.valid:
            group.state = group.state.ended_validly(index)
        else:
            fault = attempt.fault
            assert fault is not None
            group.state = group.state.faulted(index, fault, self._settings.refill)
            logger.info("attempt %s ended as a fault: %s", attempt.id, fault)
        final = group.state.slots[index].status is not SlotStatus.PENDING
        ended = EndedTry(
            group.ref,
            index,
            attempt.id.try_number,
            outcome=attempt.outcome,
            turns=attempt.turns,
            tokens=group.sampled[index],
            ended_at_s=attempt.finished_at_s,
            final=final,
            counted=not attempt.valid,
            fault=attempt.fault,
            payload=wire.attempt_to_bytes(attempt) if final else None,
        )
        await self._durably(lambda: self._ledger.end_try(ended))
        self._count(group.ref.consumer_id, attempt.outcome)

    async def _durably(self, step: Callable[[], Awaitable[T]]) -> T:
        """Write to the ledger, for as long as it takes: what is finished must not be lost.

        While the ledger is in trouble no attempt is started.
        """
        backoff = Backoff(0.5, 2.0, 10.0)
        failures = 0
        reminded_s = 0.0
        while True:
            try:
                result = await step()
            except LedgerError as error:
                failures += 1
                self.ledger_trouble = error
                self._ledger_well.clear()
                if failures == 1 or self._clock() - reminded_s > _REMIND_S:
                    reminded_s = self._clock()
                    logger.error("finished work waits for the ledger: %s", error)  # noqa: TRY400
                await self._sleep(backoff.delay_s(failures, self._rng.random()))
            else:
                if failures:
                    logger.info("the ledger is well again")
                self.ledger_trouble = None
                self._ledger_well.set()
                return result


__all__ = ["Supervisor", "SupervisorSettings"]
