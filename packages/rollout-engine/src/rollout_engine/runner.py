"""One try at an attempt, from its lease to its outcome: token in, token out.

Whatever fails on the way becomes a `FAULT` that says where and why. A cancelled try stops the
generation at its engine and destroys its sandbox before the cancellation goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from opentelemetry import trace
from opentelemetry.trace import Span, StatusCode
from service_kit.errors import Reason, ServiceError
from service_kit.telemetry import current_traceparent, parent_context, tracer

from rollout_engine.core.attempt import (
    Ending,
    Faulted,
    Graded,
    NothingToGrade,
    Started,
)
from rollout_engine.core.outcome import fault_of
from rollout_engine.limiters import Limiter
from rollout_engine.peers import Grader, Task, Tasks, Workspace, Workspaces
from rollout_engine.turn import AttemptJob, Run, TurnTaker
from rollout_engine.types import (
    Attempt,
    AttemptTiming,
    FaultStage,
    Outcome,
    Segment,
)

logger = logging.getLogger(__name__)


class AttemptRunner:
    """Makes tries at attempts. Keeps nothing between them.

    Args:
        sandbox_starts: Limits sandboxes that are being made at once.
        graders: Limits gradings at once.
        clock: Monotonic seconds.
        wall_clock: Unix seconds.

    """

    def __init__(
        self,
        *,
        tasks: Tasks,
        workspaces: Workspaces,
        grader: Grader,
        turns: TurnTaker,
        sandbox_starts: Limiter,
        graders: Limiter,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._tasks = tasks
        self._workspaces = workspaces
        self._grader = grader
        self._turns = turns
        self._sandbox_starts = sandbox_starts
        self._graders = graders
        self._clock = clock
        self._wall_clock = wall_clock
        self._tracer = tracer("rollout_engine")

    async def run(self, job: AttemptJob) -> Attempt:
        """Make one try.

        Returns:
            The attempt with its outcome; never `CANCELLED`. A `FAULT` comes without tokens.

        Raises:
            asyncio.CancelledError: After engine and sandbox have been told.

        """
        started_s = self._clock()
        run = Run(job)
        with self._tracer.start_as_current_span(
            "attempt",
            context=parent_context(job.assignment.traceparent),
            attributes=_attributes(job),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                await self._play(run)
            except asyncio.CancelledError:
                span.set_attribute("outcome", Outcome.CANCELLED.value)
                raise
            except Exception as error:
                fault = fault_of(error, run.stage)
                if not isinstance(error, ServiceError):
                    logger.exception("attempt %s failed at %s", job.id, run.stage)
                run.step(Faulted(fault))
            finally:
                self._turns.end(run)
                if run.workspace is not None:
                    # Runs to its end even while this task is being cancelled: a cancellation is
                    # delivered once, and `destroy` has a deadline of its own.
                    await run.workspace.destroy()
            ending = run.state.ending
            assert ending is not None
            _describe(span, run, ending)
            return self._attempt(run, ending, started_s)

    def _attempt(self, run: Run, ending: Ending, started_s: float) -> Attempt:
        job = run.job
        segments: tuple[Segment, ...] = ()
        if ending.outcome.valid:
            segments = run.tokens.freeze(job.assignment.sampling)
        return Attempt(
            id=job.id,
            task_id=job.assignment.task_id,
            outcome=ending.outcome,
            reward=ending.reward,
            graded=ending.graded,
            limit=ending.limit,
            fault=ending.fault,
            turns=run.state.turns,
            segments=segments,
            timing=AttemptTiming(
                queue_s=job.queued_s,
                sandbox_start_s=run.sandbox_start_s,
                generate_s=run.generate_s,
                command_s=run.usage.command_time_s,
                grade_s=run.grade_s,
                total_s=self._clock() - started_s + job.queued_s,
            ),
            traceparent=current_traceparent(),
            grade_reason=ending.grade_reason,
            diff=run.diff if ending.outcome.valid else b"",
            finished_at_s=self._wall_clock(),
        )

    async def _play(self, run: Run) -> None:
        task = await self._tasks.get(run.job.assignment.task_id)
        run.workspace = await self._start(run, task)
        run.stage = FaultStage.INTERNAL
        run.step(Started())
        self._turns.open(run, task)
        while True:
            with self._tracer.start_as_current_span(
                "turn", attributes={"turn": run.state.turns}, record_exception=False
            ):
                stop = await self._turns.take(run, task, run.workspace)
            if stop is not None:
                run.step(stop)
                break
        await self._judge(run, run.workspace)

    async def _start(self, run: Run, task: Task) -> Workspace:
        run.stage = FaultStage.SANDBOX_START
        async with self._sandbox_starts.slot(run.job.priority):
            began_s = self._clock()
            with self._tracer.start_as_current_span("sandbox.create", record_exception=False):
                workspace = await self._workspaces.create(task, run.job.sandbox_key)
            run.sandbox_start_s = self._clock() - began_s
        return workspace

    async def _judge(self, run: Run, workspace: Workspace) -> None:
        run.stage = FaultStage.DIFF
        try:
            run.diff = await workspace.diff()
        except ServiceError as error:
            if error.reason is not Reason.TOO_LARGE:
                raise
            run.step(NothingToGrade("diff_too_large"))
            return
        # The agent's sandbox is of no use any more: its place is free while the grader works.
        await workspace.destroy()
        if not run.diff:
            run.step(NothingToGrade())
            return
        run.stage = FaultStage.GRADE
        job = run.job
        async with self._graders.slot(job.priority):
            began_s = self._clock()
            with self._tracer.start_as_current_span("grade", record_exception=False) as span:
                grade = await self._grader.grade(job.assignment.task_id, job.id, run.diff)
                span.set_attribute("solved", grade.solved)
            run.grade_s = self._clock() - began_s
        run.step(Graded(grade.solved, grade.reason))


def _attributes(job: AttemptJob) -> dict[str, str | int]:
    return {
        "group.id": job.id.key.group_id,
        "group.epoch": job.id.key.epoch,
        "attempt.index": job.id.index,
        "attempt.try": job.id.try_number,
        "task.id": job.assignment.task_id,
    }


def _describe(span: Span, run: Run, ending: Ending) -> None:
    span.set_attribute("outcome", ending.outcome.value)
    span.set_attribute("turns", run.state.turns)
    span.set_attribute("tokens.sampled", run.usage.sampled_tokens)
    if ending.fault is not None:
        span.set_attribute("fault.stage", ending.fault.stage.value)
        span.set_attribute("fault.cause", ending.fault.cause.value)
        span.set_status(trace.Status(StatusCode.ERROR, ending.fault.message))
    else:
        span.set_attribute("reward", ending.reward)


__all__ = ["AttemptRunner"]
