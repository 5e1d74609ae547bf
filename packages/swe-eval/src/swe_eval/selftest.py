"""The self-test of tasks: grades each one's reference and no change at all, several times.

The decision is `core.selftest.decide`'s; here are the gradings, as many tasks at once as the grader
takes, the repetition of what infrastructure did wrong, and the file that it all goes into.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace

from service_kit.errors import Reason, ServiceError

from swe_eval.core.selftest import Fault, Outcome, Run, decide, undecided
from swe_eval.core.verdict import GradeReason, Verdict
from swe_eval.grading.faults import FAULT_CAUSE_KEY, GRADE_REASON_KEY, STAGE_KEY
from swe_eval.grading.identity import judge_digest
from swe_eval.grading.run import Grade, Grader
from swe_eval.tasks.digest import task_digest
from swe_eval.tasks.selftest_file import Record, SelfTestFile
from swe_eval.tasks.task import Task

__all__ = ["FaultedError", "SelfTest", "untested"]

logger = logging.getLogger(__name__)

# The service's answer would be the same.
_HOPELESS = {Reason.FAILED_PRECONDITION, Reason.INVALID_ARGUMENT, Reason.UNAUTHENTICATED}
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


def untested(
    tasks: Iterable[Task], file: SelfTestFile, *, repeat: int
) -> tuple[list[Task], list[Record]]:
    """The tasks that are still to be tested, and the records of the others."""
    todo: list[Task] = []
    known: list[Record] = []
    for task in tasks:
        record = file.known(task.task_id, task_digest(task), repeat, judge_digest())
        if record is None:
            todo.append(task)
        else:
            known.append(record)
    return todo, known


class FaultedError(Exception):
    """A grading failed as often as it was tried."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


@dataclass(frozen=True, kw_only=True)
class _Tested:
    task: Task
    record: Record
    for_want_of_time: bool
    """Whether it would be quarantined, and a run was cut short by the clock."""


class SelfTest:
    """Tests tasks, several at a time.

    Args:
        grader: Grades; its limit is the number of tasks at once.
        file: Where records go to.
        repeat: How often to grade the reference, and no change.
        tries: How often to try a grading that infrastructure fails.
        clock: Seconds of a monotonic clock.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        grader: Grader,
        file: SelfTestFile,
        *,
        repeat: int = 2,
        tries: int = 3,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._grader = grader
        self._file = file
        self._repeat = repeat
        self._tries = tries
        self._clock = clock
        self._sleep = sleep

    async def run(self, tasks: Iterable[Task]) -> AsyncIterator[Record]:
        """Records in the order in which they come; each is in the file by then.

        Of a task that would be quarantined and ran out of time beside others nothing is known:
        they took its time. It is tested again at the end, alone.

        Raises:
            OSError: the file can't be written.
        """
        late: list[Task] = []
        for again in (False, True):
            todo, at_once = (late, 1) if again else (tasks, self._grader.limiter.limit)
            async with aclosing(self._each(todo, at_once)) as found:
                async for tested in found:
                    if tested.for_want_of_time and not again:
                        late.append(tested.task)
                        continue
                    self._file.add(tested.record)
                    yield tested.record
            if late and not again:
                logger.warning(
                    "%d tasks ran out of time beside others; each is tested again, alone", len(late)
                )

    async def _each(self, tasks: Iterable[Task], at_once: int) -> AsyncGenerator[_Tested]:
        waiting = iter(tasks)
        running: set[asyncio.Task[_Tested]] = set()
        crowded: set[asyncio.Task[_Tested]] = set()
        try:
            while True:
                for task in itertools.islice(waiting, at_once - len(running)):
                    running.add(asyncio.create_task(self._test(task)))
                if not running:
                    return
                if len(running) > 1:
                    crowded |= running
                done, running = await asyncio.wait(running, return_when="FIRST_COMPLETED")
                for one in done:
                    tested = one.result()
                    yield tested if one in crowded else replace(tested, for_want_of_time=False)
                crowded -= done
        finally:
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _test(self, task: Task) -> _Tested:
        began = self._clock()
        gold: list[Run] = []
        empty: list[Run] = []
        try:
            if task.reference is not None:
                await self._run(task, gold, empty)
            decision = decide(gold, empty)
        except FaultedError as error:
            decision = undecided(error.fault)
        record = Record(
            task_id=task.task_id,
            digest=task_digest(task),
            repeat=self._repeat,
            decision=decision,
            wall_s=self._clock() - began,
            judge=judge_digest(),
        )
        overdue = any(run.reason is GradeReason.TIMEOUT for run in (*gold, *empty))
        bad = decision.outcome is Outcome.QUARANTINED
        return _Tested(task=task, record=record, for_want_of_time=bad and overdue)

    async def _run(self, task: Task, gold: list[Run], empty: list[Run]) -> None:
        for number in range(self._repeat):
            gold.append(await self._grade(task, self._grader.grade_reference, f"gold-{number}"))
            empty.append(await self._grade(task, self._grader.grade_untouched, f"empty-{number}"))

    async def _grade(self, task: Task, grade: Callable[..., Awaitable[Grade]], name: str) -> Run:
        for number in range(1, self._tries + 1):
            try:
                return _run_of(await grade(task, attempt=f"{task.task_id}/{name}/{number}"))
            except ServiceError as error:
                if error.metadata.get(FAULT_CAUSE_KEY) == "TASK":
                    return _broken(error)
                if number == self._tries or error.reason in _HOPELESS:
                    raise FaultedError(_fault_of(error)) from error
                pause_s = min(_FIRST_PAUSE_S * 2 ** (number - 1), _LONGEST_PAUSE_S)
                await self._sleep(max(pause_s, error.retry_after_s or 0.0))
        raise AssertionError("a grading is tried at least once")


def _run_of(grade: Grade) -> Run:
    return Run(
        verdict=grade.verdict,
        reason=grade.reason,
        detail=grade.detail,
        statuses={test.name: test.status for test in grade.tests if test.required},
    )


def _broken(error: ServiceError) -> Run:
    """Of a task that its own reference does not pass, which an agent's grading calls a fault."""
    reason = GradeReason(error.metadata.get(GRADE_REASON_KEY, GradeReason.TESTS_ABORTED))
    return Run(verdict=Verdict.UNSOLVED, reason=reason, detail=error.message)


def _fault_of(error: ServiceError) -> Fault:
    return Fault(
        cause=error.metadata.get(FAULT_CAUSE_KEY, "GRADER"),
        stage=error.metadata.get(STAGE_KEY, ""),
        message=error.message,
    )
