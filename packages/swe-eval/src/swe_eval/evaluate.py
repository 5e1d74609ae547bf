"""Runs an evaluation: assigns tasks to rollout-engines, scores what comes back, reports.

Each engine has a consumer of its own. A result is on disk before the engine is told that it may
drop the group, so an evaluation that is killed is resumed by its name and counts nothing twice.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
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

from swe_eval.atif import Decoder
from swe_eval.config import EvaluationConfig
from swe_eval.core.evaluation import Book, Plan, Progress, Report
from swe_eval.core.sampling import Candidate, draw, list_digest, stratum_of
from swe_eval.engines import MakeConsumer, group_consumer
from swe_eval.evaluation_run import EvaluationRun
from swe_eval.journal import Journal, check_name
from swe_eval.tasks.sets import Catalog, TaskSet
from swe_eval.trajectories import TrajectoryStore, trajectory_files

Event = Plan | Progress | Report


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
    stratify_by: Sequence[str] = ()
    """Columns of the tasks that make a stratum; empty: those of the set."""
    task_ids: Sequence[str] = ()
    """The exact list, instead of a draw."""
    targets: Sequence[str] = ()
    traceparent: str = ""


class Evaluator:
    """Evaluates policies on the tasks of a catalog; each evaluation runs once at a time.

    Args:
        catalog: Where tasks come from.
        config: Engines, folder of journals, deadlines.
        make_consumer: Replaces the connection to engines, for tests.
        clock: Seconds of the monotonic clock that consumers use too.
        decoder: Turns the tokens of trajectories into text.
    """

    def __init__(
        self,
        catalog: Catalog,
        config: EvaluationConfig,
        *,
        make_consumer: MakeConsumer = group_consumer,
        clock: Callable[[], float] = time.monotonic,
        decoder: Decoder | None = None,
    ) -> None:
        self._catalog = catalog
        self._config = config
        self._make_consumer = make_consumer
        self._clock = clock
        self._decoder = decoder or Decoder()
        self._folder = config.state_dir.expanduser() / "evaluations"
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
        columns = {ref.task_id: ref.columns for ref in task_set.refs(0, len(task_set))}
        by = _stratify_by(request, task_set, columns.values())
        strata = {task_id: stratum_of(values, by) for task_id, values in columns.items()}
        chosen = _chosen(request, strata)
        return Plan(
            name=request.name,
            task_set=request.task_set,
            task_ids=tuple(chosen),
            strata=tuple(strata[task_id] for task_id in chosen),
            stratified_by=by,
            task_seed=request.task_seed,
            attempts=request.attempts,
            version=request.version,
            temperature=request.temperature,
            top_p=request.top_p,
            sampling_seed=request.sampling_seed,
            list_digest=list_digest(chosen),
        )

    async def evaluate(self, request: EvaluationRequest) -> AsyncGenerator[Event]:
        """Yields the plan, then progress, and the report as the last event.

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
            journal = await asyncio.to_thread(Journal.open, self._folder, plan)
            try:
                yield plan
                events = self._watch(request, plan, journal)
                async with aclosing(events):
                    async for event in events:
                        yield event
            finally:
                journal.close()
        finally:
            self._running.discard(plan.name)

    def trajectories(self, name: str, after: str = "") -> list[Path]:
        """The trajectory files of an evaluation, from the one after `after` on.

        Raises:
            NotFound: no evaluation of this name has begun here.
        """
        if not (self._folder / f"{check_name(name)}.jsonl").is_file():
            raise NotFound(f"no evaluation {name!r}; evaluate under this name first")
        return trajectory_files(self._trajectories(name), after)

    def _trajectories(self, name: str) -> Path:
        return self._folder / f"{name}.trajectories"

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
            store = None
            if self._config.trajectories:
                store = TrajectoryStore(
                    self._trajectories(book.plan.name), self._decoder, evaluation=book.plan.name
                )
                if journal.life == 1:
                    await asyncio.to_thread(store.clear)
            run = EvaluationRun(
                book=book,
                journal=journal,
                engines=engines,
                config=self._config,
                clock=self._clock,
                began=began,
                changed=changed,
                traceparent=request.traceparent,
                trajectories=store,
            )
            try:
                await run.until_finished()
            except BaseExceptionGroup as group:
                raise next(
                    (e for e in leaf_errors(group) if isinstance(e, ServiceError)), group
                ) from group


def _stratify_by(
    request: EvaluationRequest, task_set: TaskSet, tasks: Collection[Mapping[str, str]]
) -> tuple[str, ...]:
    known = {name for columns in tasks for name, value in columns.items() if value}
    unknown = [name for name in request.stratify_by if name not in known]
    if unknown:
        raise InvalidArgument(
            f"task set {request.task_set!r} has no column {', '.join(map(repr, unknown))} to "
            f"stratify by; it has: {', '.join(sorted(known))}"
        )
    return tuple(request.stratify_by) or tuple(n for n in task_set.stratify_by if n in known)


def _chosen(request: EvaluationRequest, strata: Mapping[str, str]) -> list[str]:
    where = f"task set {request.task_set!r}"
    if not request.task_ids:
        try:
            return draw(
                (Candidate(task_id=t, stratum=stratum) for t, stratum in strata.items()),
                count=request.tasks,
                seed=request.task_seed,
            )
        except ValueError as error:
            raise InvalidArgument(f"{where}: {error}") from error
    chosen = list(request.task_ids)
    if request.tasks:
        raise InvalidArgument(f"{where}: give a list of tasks or a number of them, not both")
    if len(set(chosen)) != len(chosen):
        twice = next(task_id for task_id in chosen if chosen.count(task_id) > 1)
        raise InvalidArgument(f"{where}: task {twice!r} is in the list twice; name each once")
    missing = [task_id for task_id in chosen if task_id not in strata]
    if missing:
        raise InvalidArgument(
            f"{where} lacks {len(missing)} of the {len(chosen)} listed tasks, the first "
            f"{missing[0]!r}; name the set that the list was drawn from"
        )
    return chosen
