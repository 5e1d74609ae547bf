"""Runs an evaluation: assigns tasks to rollout-engines, scores what comes back, reports.

Each engine has a consumer of its own. A result is on disk before the engine is told that it may
drop the group, so an evaluation that is killed is resumed by its name and counts nothing twice.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any

from service_kit.channel import ChannelConfig, open_channel
from service_kit.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Reason,
    ServiceError,
    Unavailable,
    leaf_errors,
)
from tailrace.rollout.v1 import rollout_service_pb2

from swe_eval.config import EvaluationConfig
from swe_eval.core.evaluation import Book, Plan, Progress, Report
from swe_eval.core.sampling import Candidate, draw, list_digest
from swe_eval.engines import MakeConsumer, group_consumer
from swe_eval.evaluation_run import EvaluationRun
from swe_eval.journal import Journal, check_name
from swe_eval.tasks.sets import Catalog

Event = Progress | Report


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRequest:
    """What to measure, and how."""

    name: str
    task_set: str
    attempts: int
    tasks: int = 0
    """0: all. Else the first so many of the seeded, stratified order."""
    task_seed: int = 0
    version: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    sampling_seed: int = 0
    targets: Sequence[str] = ()
    traceparent: str = ""


class Evaluator:
    """Evaluates policies on the tasks of a catalog; each evaluation runs once at a time.

    Args:
        catalog: Where tasks come from.
        config: Engines, folder of journals, deadlines.
        make_consumer: Replaces the connection to engines, for tests.
        clock: Seconds of the monotonic clock that consumers use too.
    """

    def __init__(
        self,
        catalog: Catalog,
        config: EvaluationConfig,
        *,
        make_consumer: MakeConsumer = group_consumer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalog = catalog
        self._config = config
        self._make_consumer = make_consumer
        self._clock = clock
        self._running: set[str] = set()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Ends running evaluations with a retryable error, and lets none begin."""
        self._stopping.set()

    def plan(self, request: EvaluationRequest) -> Plan:
        """The exact list of tasks and settings that a request stands for.

        Raises:
            NotFound: no such task set.
            InvalidArgument: a setting is out of its range.
        """
        check_name(request.name)
        task_set = self._catalog.task_set(request.task_set)
        if task_set is None:
            known = ", ".join(s.name for s in self._catalog.task_sets) or "none"
            raise NotFound(f"no task set {request.task_set!r}; this service has: {known}")
        if request.attempts < 1:
            raise InvalidArgument(f"attempts must be at least 1, got {request.attempts}")
        if request.temperature < 0 or not 0 < request.top_p <= 1:
            raise InvalidArgument(
                "temperature must be at least 0 and top_p in (0, 1], got "
                f"{request.temperature} and {request.top_p}"
            )
        refs = task_set.refs(0, len(task_set))
        try:
            chosen = draw(
                (Candidate(task_id=ref.task_id, stratum=ref.kind) for ref in refs),
                count=request.tasks,
                seed=request.task_seed,
            )
        except ValueError as error:
            raise InvalidArgument(f"task set {request.task_set!r}: {error}") from error
        kinds = {ref.task_id: ref.kind for ref in refs}
        return Plan(
            name=request.name,
            task_set=request.task_set,
            task_ids=tuple(chosen),
            kinds=tuple(kinds[task_id] for task_id in chosen),
            task_seed=request.task_seed,
            attempts=request.attempts,
            version=request.version,
            temperature=request.temperature,
            top_p=request.top_p,
            sampling_seed=request.sampling_seed,
            list_digest=list_digest(chosen),
        )

    async def evaluate(self, request: EvaluationRequest) -> AsyncGenerator[Event]:
        """Yields progress, and the report as the last event.

        Leaving the iterator early stops the evaluation; the same request again resumes it.

        Raises:
            ServiceError: the request is wrong, the evaluation runs already, the journal can't be
                written, or no engine was reachable for `idle_s`.
        """
        plan = await asyncio.to_thread(self.plan, request)
        if plan.name in self._running:
            raise FailedPrecondition(
                f"evaluation {plan.name!r} is running; wait for it, or use another name",
                retryable=True,
            )
        self._running.add(plan.name)
        try:
            folder = self._config.state_dir.expanduser() / "evaluations"
            journal = await asyncio.to_thread(Journal.open, folder, plan)
            try:
                events = self._watch(request, plan, journal)
                async with aclosing(events):
                    async for event in events:
                        yield event
            finally:
                journal.close()
        finally:
            self._running.discard(plan.name)

    async def _watch(
        self, request: EvaluationRequest, plan: Plan, journal: Journal
    ) -> AsyncGenerator[Event]:
        began = self._clock()
        book = Book(plan, retries=self._config.quarantine_retries, scores=journal.scores)
        yield book.progress
        if not book.finished:
            shown = book.progress
            changed = asyncio.Event()
            work = asyncio.ensure_future(self._work(request, book, journal, began, changed))
            try:
                while not work.done():
                    await self._news(work, changed)
                    if book.progress != shown:
                        shown = book.progress
                        yield shown
                work.result()
            finally:
                work.cancel()
                await asyncio.wait({work})
        yield await asyncio.to_thread(
            book.report,
            wall_s=journal.spent_s + self._clock() - began,
            resamples=self._config.resamples,
        )

    async def _news(self, work: asyncio.Future[None], changed: asyncio.Event) -> None:
        """Waits until the work is done or something has changed."""
        events = [asyncio.ensure_future(e.wait()) for e in (changed, self._stopping)]
        watched: set[asyncio.Future[Any]] = {work, *events}
        try:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for event in events:
                event.cancel()
        changed.clear()
        if self._stopping.is_set() and not work.done():
            raise Unavailable(
                "the service is shutting down; evaluate again with the same name to go on",
                reason=Reason.DRAINING,
            )

    async def _work(
        self,
        request: EvaluationRequest,
        book: Book,
        journal: Journal,
        began: float,
        changed: asyncio.Event,
    ) -> None:
        channels = [ChannelConfig(target=target) for target in request.targets]
        async with AsyncExitStack() as stack:
            engines = {}
            for config in channels or self._config.rollout_targets:
                channel = await stack.enter_async_context(
                    open_channel(config, contracts=[rollout_service_pb2.DESCRIPTOR])
                )
                engines[config.target] = self._make_consumer(
                    channel,
                    f"evaluation:{book.plan.name}:{journal.identity}",
                    journal.life,
                    journal.cursors.get(config.target, 0),
                )
            run = EvaluationRun(
                book=book,
                journal=journal,
                engines=engines,
                config=self._config,
                clock=self._clock,
                began=began,
                changed=changed,
                traceparent=request.traceparent,
            )
            try:
                await run.until_finished()
            except BaseExceptionGroup as group:
                raise next(
                    (e for e in leaf_errors(group) if isinstance(e, ServiceError)), group
                ) from group
