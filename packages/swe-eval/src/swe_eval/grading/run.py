"""Grades a diff: a fresh sandbox, the diff, the hidden tests, a verdict.

Verdicts are about the diff. Whatever else goes wrong raises `ServiceError` with a `fault_cause` in
its metadata. A run that exceeded the limits counts against the diff only if the reference solution
keeps them; that is tried once a task and remembered.
"""

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from service_kit.errors import FailedPrecondition, Internal, Reason, ServiceError, service_error

from swe_eval.config import GradingConfig
from swe_eval.core.verdict import GradeReason, Judgement, TestResult, TestStatus, Verdict
from swe_eval.grading.controls import Control, LineControl
from swe_eval.grading.faults import (
    FAULT_CAUSE_KEY,
    GRADE_REASON_KEY,
    Stage,
    is_chosen,
    with_cause,
)
from swe_eval.grading.host import SandboxHost
from swe_eval.grading.limiter import Limiter
from swe_eval.grading.log_run import named_in_command
from swe_eval.grading.prepare import PreparedDiff, RefusedDiff, prepare_diff, unexpected_paths
from swe_eval.grading.trial import Observation, Trial
from swe_eval.tasks.task import LogGrader, Reference, ScriptGrader, Task, TestGrader

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """A verdict and what led to it."""

    verdict: Verdict
    reason: GradeReason
    detail: str = ""
    tests: tuple[TestResult, ...] = ()
    log_tail: str = ""
    wall_s: float = 0.0
    """From the request to the verdict, without waiting in line."""
    sandbox_start_s: float = 0.0


class Grader:
    """Grades diffs, several at a time.

    Args:
        host: Where sandboxes come from.
        config: Limits and deadlines.
        clock: Seconds of a monotonic clock.
        new_secret: Makes secrets of so many bytes, which the tested code must not guess.
    """

    def __init__(
        self,
        host: SandboxHost,
        config: GradingConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        new_secret: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._host = host
        self._config = config
        self._clock = clock
        self._trial = Trial(
            host=host, python=config.python, log_bytes=config.log_bytes, new_secret=new_secret
        )
        self._sound: set[str] = set()
        self._blind: defaultdict[str, set[str]] = defaultdict(set)
        self._line_controls: dict[str, Control | None] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.limiter = Limiter(config.concurrency, max_waiting=config.max_waiting, clock=clock)
        self.graded = 0
        self.faulted = 0

    async def grade(self, task: Task, diff: bytes, *, attempt: str) -> Grade:
        """Grades one diff.

        Args:
            task: The task it is for.
            diff: Git format, against the pristine environment.
            attempt: Names the attempt; decides about injected faults.

        Raises:
            ServiceError: infrastructure failed, or the task itself is broken; never a verdict.
        """
        with self._counted(attempt):
            prepared = self._prepare(task, diff)
            if isinstance(prepared, RefusedDiff):
                return _unsolved(task, prepared.reason, prepared.detail)
            async with self.limiter.slot():
                return await self._patiently(lambda: self._grade(task, prepared))

    async def grade_reference(self, task: Task, *, attempt: str) -> Grade:
        """Grades the reference solution as an agent's work is: by its diff alone.

        Raises:
            ServiceError: as `grade`.
            ValueError: the task has none.
        """
        reference = task.reference
        if reference is None:
            raise ValueError(f"task {task.task_id} has no reference solution")
        diff = reference.patch
        if reference.files and not diff:
            async with self.limiter.slot():
                diff = await self._patiently(lambda: self._diff_of(task, reference))
        return await self.grade(task, diff, attempt=attempt)

    async def grade_untouched(self, task: Task, *, attempt: str) -> Grade:
        """Runs the tests where nothing was changed; of an empty diff `grade` says so unseen.

        Raises:
            ServiceError: infrastructure failed.
        """
        with self._counted(attempt):
            async with self.limiter.slot():
                return await self._patiently(lambda: self._grade_untouched(task))

    @contextmanager
    def _counted(self, attempt: str) -> Iterator[None]:
        try:
            self._inject_fault(attempt)
            yield
        except ServiceError:
            self.faulted += 1
            raise
        self.graded += 1

    def _inject_fault(self, attempt: str) -> None:
        faults = self._config.faults
        if is_chosen(attempt, rate=faults.grade_rate, seed=faults.seed):
            raise service_error(
                Reason.INJECTED_FAULT,
                f"the grader of attempt {attempt} was told to fail (grading.faults)",
                # A repetition of this attempt would fail again.
                retryable=False,
                metadata={FAULT_CAUSE_KEY: "INJECTED"},
            )

    def _prepare(self, task: Task, diff: bytes) -> PreparedDiff | RefusedDiff:
        return prepare_diff(
            diff,
            max_bytes=self._config.max_diff_bytes,
            hidden_tests=_hidden_tests(task),
            # A Harbor test.sh brings its own tests, and its task may well be to write some.
            protect=not isinstance(task.grader, ScriptGrader),
        )

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """Begins anew when a sandbox was lost: the diff is all that it takes."""
        for _ in range(self._config.retries):
            try:
                return await work()
            except ServiceError as error:
                if error.reason is not Reason.SANDBOX_GONE:
                    raise
                logger.warning("a sandbox was lost, grading begins anew: %s", error.message)
        return await work()

    async def _diff_of(self, task: Task, reference: Reference) -> bytes:
        async with self._sandbox(task) as sandbox_id:
            with _at(Stage.RUN_REFERENCE):
                await self._trial.solve(task, reference, sandbox_id)
                return await self._host.diff(sandbox_id)

    async def _grade_untouched(self, task: Task) -> Grade:
        began = self._clock()
        async with self._sandbox(task) as sandbox_id:
            start_s = self._clock() - began
            with _at(Stage.RUN_TESTS):
                seen = await self._trial.run(task, sandbox_id)
                self._demand_started(task, seen)
        return _graded(seen, wall_s=self._clock() - began, sandbox_start_s=start_s)

    async def _grade(self, task: Task, prepared: PreparedDiff) -> Grade:
        began = self._clock()
        async with self._sandbox(task) as sandbox_id:
            start_s = self._clock() - began
            refused = await self._apply(sandbox_id, prepared)
            if refused is not None:
                return _unsolved(task, refused.reason, refused.detail, self._clock() - began)
            with _at(Stage.RUN_TESTS):
                seen = await self._trial.run(task, sandbox_id)
        if seen.unstarted:
            await self._grade_untouched(task)
        if seen.judgement.needs_reference:
            await self._demand_sound(task, seen)
        elif seen.judgement.verdict is Verdict.SOLVED and self._config.controls:
            seen = await self._controlled(task, prepared, seen)
        return _graded(seen, wall_s=self._clock() - began, sandbox_start_s=start_s)

    async def _controlled(
        self, task: Task, prepared: PreparedDiff, seen: Observation
    ) -> Observation:
        """What to make of a run that passed, after one with altered tests (`grading.controls`)."""
        control = await self._control(task)
        if control is None:
            return seen
        async with self._sandbox(task) as sandbox_id:
            refused = await self._apply(sandbox_id, prepared)
            if refused is not None:
                raise Internal(
                    f"a diff that applied to task {task.task_id} did not do so the second time: "
                    f"{refused.detail}"
                )
            with _at(Stage.RUN_CONTROL):
                found = await self._trial.run_altered(task, control, sandbox_id)
        judgement = control.judge(found.judgement)
        wrong = control.wrong(found.judgement.tests)
        if judgement.verdict is Verdict.SOLVED:
            return seen
        if wrong and wrong <= await self._excused(task, control, wrong):
            return seen
        named = ", ".join(sorted(wrong)[:5])
        detail = (
            "all tests passed, but altered they do not end as they do with a right program"
            + (f": {named}" if named else "")
            + (f" ({found.detail})" if found.detail else "")
        )
        tests = seen.judgement.tests
        return replace(found, detail=detail, judgement=replace(judgement, tests=tests))

    async def _control(self, task: Task) -> Control | None:
        """Another one each time, where it is known which tests were altered; else one a task."""
        if isinstance(task.grader, TestGrader):
            return self._trial.control_of(task, blind=self._blind[task.task_id])
        if task.reference is None:
            return None  # whether the altered lines are run at all could not be told
        async with self._locks[task.task_id]:
            if task.task_id not in self._line_controls:
                control = self._trial.control_of(task, blind=())
                if isinstance(control, LineControl):
                    control = control.learned(await self._with_reference(task, control))
                self._line_controls[task.task_id] = control
            return self._line_controls[task.task_id]

    async def _excused(self, task: Task, control: Control, wrong: frozenset[str]) -> frozenset[str]:
        """Of a control's tests those that prove nothing: with the reference too they end wrongly.

        They notice no change, or depend on others that stopped early; neither is altered again.
        """
        if task.reference is None or isinstance(control, LineControl):
            return frozenset()
        excused = control.wrong((await self._with_reference(task, control)).tests)
        self._blind[task.task_id] |= excused
        if excused - control.altered:
            self._blind[task.task_id] |= control.altered
        return excused

    async def _with_reference(self, task: Task, control: Control) -> Judgement:
        assert task.reference is not None
        async with self._sandbox(task) as sandbox_id:
            with _at(Stage.RUN_REFERENCE):
                await self._trial.solve(task, task.reference, sandbox_id)
                return (await self._trial.run_altered(task, control, sandbox_id)).judgement

    async def _apply(self, sandbox_id: str, prepared: PreparedDiff) -> RefusedDiff | None:
        with _at(Stage.APPLY_DIFF):
            try:
                changed = await self._host.apply_patch(sandbox_id, prepared.patch)
            except ServiceError as error:
                if error.reason is Reason.PATCH_REJECTED:
                    return RefusedDiff(reason=GradeReason.PATCH_REJECTED, detail=error.message)
                if error.reason is Reason.TOO_LARGE:
                    return RefusedDiff(reason=GradeReason.DIFF_TOO_LARGE, detail=error.message)
                raise
        unexpected = unexpected_paths(changed, prepared)
        if unexpected:
            return RefusedDiff(
                reason=GradeReason.UNSAFE_PATH,
                detail=f"applying it changed {unexpected[:5]}, which it does not name",
            )
        return None

    async def _demand_sound(self, task: Task, seen: Observation) -> None:
        """Raises unless the reference solution passes where this run ended before its tests did."""
        async with self._locks[task.task_id]:
            if task.task_id in self._sound:
                return
            if await self._reference_passes(task):
                self._sound.add(task.task_id)
                return
        raise FailedPrecondition(
            f"task {task.task_id}: its reference solution does not pass either "
            f"({seen.judgement.reason}: {seen.detail}; last output: {_last_line(seen)!r}); mend "
            "the task or its limits, or leave it out",
            metadata={FAULT_CAUSE_KEY: "TASK", GRADE_REASON_KEY: seen.judgement.reason.value},
        )

    def _demand_started(self, task: Task, seen: Observation) -> None:
        """Raises if not even the untouched repository's tests could be started."""
        if not seen.unstarted:
            return
        image = task.environment.image
        where = f"image {image!r}" if image else "the sandboxes"
        mend = (
            "name one that has it"
            if image
            else "set local.site_packages of the sandbox service to a folder that has pytest"
        )
        raise FailedPrecondition(
            f"the tests of task {task.task_id} can't be started: no {self._config.python!r} with "
            f"what they need in {where} (last output: {_last_line(seen)!r}); {mend}",
            metadata={FAULT_CAUSE_KEY: "IMAGE" if image else "SANDBOX"},
        )

    async def _reference_passes(self, task: Task) -> bool:
        """Without a reference, the tests that pass in the untouched repository stand in for it."""
        async with self._sandbox(task) as sandbox_id:
            with _at(Stage.RUN_REFERENCE):
                if task.reference is not None:
                    await self._trial.solve(task, task.reference, sandbox_id)
                    seen = await self._trial.run(task, sandbox_id)
                    return seen.judgement.verdict is Verdict.SOLVED
                grader = task.grader
                keeping = None if isinstance(grader, ScriptGrader) else grader.pass_to_pass
                if keeping == ():
                    return True  # nothing to compare with: the task's word stands
                seen = await self._trial.run(task, sandbox_id, required=keeping)
                return not seen.judgement.needs_reference

    @asynccontextmanager
    async def _sandbox(self, task: Task) -> AsyncIterator[str]:
        with _at(Stage.START_SANDBOX):
            sandbox_id = await self._host.create(task.environment)
        try:
            yield sandbox_id
        finally:
            try:
                await asyncio.shield(self._host.destroy(sandbox_id))
            except ServiceError as error:
                # Its lease ends it; the verdict stands.
                logger.warning("sandbox %s was not destroyed: %s", sandbox_id, error.message)


@contextmanager
def _at(stage: Stage) -> Iterator[None]:
    try:
        yield
    except ServiceError as error:
        raise with_cause(error, stage=stage) from error


def _last_line(seen: Observation) -> str:
    return seen.log_tail.strip().rpartition("\n")[2][-300:]


def _graded(seen: Observation, *, wall_s: float, sandbox_start_s: float) -> Grade:
    return Grade(
        verdict=seen.judgement.verdict,
        reason=seen.judgement.reason,
        detail=seen.detail,
        tests=seen.judgement.tests,
        log_tail=seen.log_tail,
        wall_s=wall_s,
        sandbox_start_s=sandbox_start_s,
    )


def _unsolved(task: Task, reason: GradeReason, detail: str, wall_s: float = 0.0) -> Grade:
    required = () if isinstance(task.grader, ScriptGrader) else task.grader.required
    return Grade(
        verdict=Verdict.UNSOLVED,
        reason=reason,
        detail=detail,
        tests=tuple(
            TestResult(name=name, required=True, status=TestStatus.MISSING) for name in required
        ),
        wall_s=wall_s,
    )


def _hidden_tests(task: Task) -> frozenset[str]:
    if isinstance(task.grader, TestGrader):
        return frozenset(task.grader.files)
    if isinstance(task.grader, LogGrader):
        return task.grader.protected | named_in_command(task.grader.script)
    return frozenset()
