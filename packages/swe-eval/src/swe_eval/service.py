"""EvalService: translate, call, translate back."""

import asyncio
import importlib.metadata
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any, cast

import grpc
from service_kit.errors import InvalidArgument, NotFound
from service_kit.server import Service
from service_kit.streams import with_heartbeat, with_idle_deadline
from tailrace.eval.v1 import eval_service_pb2 as pb
from tailrace.eval.v1 import eval_service_pb2_grpc as pb_grpc

from swe_eval import wire
from swe_eval.config import EvalConfig
from swe_eval.evaluate import EvaluationRequest, Evaluator
from swe_eval.grading.run import Grader
from swe_eval.tasks.sets import Catalog, TaskSet
from swe_eval.tasks.task import Task
from swe_eval.trajectories import file_pieces

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["EvalService"].full_name

_DEFAULT_PAGE = 100
_MAX_PAGE = 1000
_REQUEST_IDLE_S = 60.0

Context = grpc.aio.ServicerContext[Any, Any]


class EvalServicer(pb_grpc.EvalServiceServicer):
    """Serves the tasks of a catalog, a grader and an evaluator."""

    def __init__(
        self, catalog: Catalog, grader: Grader, evaluator: Evaluator, config: EvalConfig
    ) -> None:
        self._catalog = catalog
        self._grader = grader
        self._evaluator = evaluator
        self._config = config

    async def drain(self) -> None:
        """Ends evaluations; they are resumed by name."""
        self._evaluator.stop()

    async def ListTaskSets(  # noqa: N802
        self, request: pb.ListTaskSetsRequest, context: Context
    ) -> pb.ListTaskSetsResponse:
        """All sets with their sizes."""
        return pb.ListTaskSetsResponse(
            task_sets=[
                pb.TaskSet(name=s.name, tasks=len(s), generated=s.generated)
                for s in self._catalog.task_sets
            ]
        )

    async def ListTasks(  # noqa: N802
        self, request: pb.ListTasksRequest, context: Context
    ) -> pb.ListTasksResponse:
        """One page of a set, in its order."""
        task_set = self._task_set(request.task_set)
        start = _start_of(request.page_token)
        if not 0 <= request.page_size <= _MAX_PAGE:
            raise InvalidArgument(
                f"page_size must lie in 0..{_MAX_PAGE} (0: {_DEFAULT_PAGE}), "
                f"got {request.page_size}"
            )
        count = request.page_size or _DEFAULT_PAGE
        refs = await asyncio.to_thread(task_set.refs, start, count)
        end = start + len(refs)
        return pb.ListTasksResponse(
            tasks=[wire.ref_to_proto(ref) for ref in refs],
            next_page_token=str(end) if refs and end < len(task_set) else "",
        )

    async def GetTask(  # noqa: N802
        self, request: pb.GetTaskRequest, context: Context
    ) -> pb.GetTaskResponse:
        """The open side of a task."""
        return pb.GetTaskResponse(task=wire.task_to_proto(self._task(request.task_id)))

    async def GetEnvironment(  # noqa: N802
        self, request: pb.GetEnvironmentRequest, context: Context
    ) -> AsyncIterator[pb.GetEnvironmentResponse]:
        """The tar of an environment's files."""
        environment = self._catalog.environment(request.digest)
        if environment is None:
            raise NotFound(
                f"no environment {request.digest!r} is at hand; call GetTask for its task first"
            )
        for chunk in wire.chunks(await asyncio.to_thread(environment.tar)):
            yield chunk

    async def Grade(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.GradeRequest], context: Context
    ) -> pb.GradeResponse:
        """Grades the diff that comes in after the header."""
        header: pb.GradeHeader | None = None
        diff = bytearray()
        async for request in with_idle_deadline(request_iterator, _REQUEST_IDLE_S, "Grade"):
            if request.WhichOneof("part") == "header":
                if header is not None:
                    raise InvalidArgument("Grade: a second header; expected chunks of the diff")
                header = request.header
            elif header is None:
                raise InvalidArgument("Grade: expected the header first, found a chunk of the diff")
            elif len(diff) <= self._config.grading.max_diff_bytes:
                diff += request.diff_chunk
            # A larger one is unsolved whatever still comes. It is read to its end all the same: an
            # answer before that can get lost.
        if header is None:
            raise InvalidArgument("Grade: expected a header, found the end of the stream")
        task = self._task(header.task_id)
        attempt = wire.attempt_key(header.attempt)
        return wire.grade_to_proto(await self._grader.grade(task, bytes(diff), attempt=attempt))

    async def Evaluate(  # noqa: N802
        self, request: pb.EvaluateRequest, context: Context
    ) -> AsyncIterator[pb.EvaluateResponse]:
        """Progress events, heartbeats, and the report at the end."""
        interval_s = self._config.evaluation.heartbeat_s
        events = self._events(wire.evaluation_from_proto(request))
        responses = cast(
            AsyncGenerator[pb.EvaluateResponse],
            with_heartbeat(events, interval_s, wire.heartbeat),
        )
        # Closed here, so that a caller who leaves stops the evaluation at once.
        async with aclosing(events), aclosing(responses):
            async for response in responses:
                yield response

    async def _events(self, request: EvaluationRequest) -> AsyncGenerator[pb.EvaluateResponse]:
        async with aclosing(self._evaluator.evaluate(request)) as events:
            async for event in events:
                yield wire.event_to_proto(event)

    async def GetTrajectories(  # noqa: N802
        self, request: pb.GetTrajectoriesRequest, context: Context
    ) -> AsyncIterator[pb.GetTrajectoriesResponse]:
        """ATIF files, piece by piece."""
        files = await asyncio.to_thread(self._evaluator.trajectories, request.name, request.after)
        for path in files:
            for chunk, last in await asyncio.to_thread(file_pieces, path):
                yield pb.GetTrajectoriesResponse(file=path.name, chunk=chunk, last=last)

    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        """What is going on."""
        limiter = self._grader.limiter
        return pb.GetStatusResponse(
            version=importlib.metadata.version("swe-eval"),
            tasks=sum(len(task_set) for task_set in self._catalog.task_sets),
            grading=limiter.in_use,
            grade_queue=limiter.waiting,
            grade_limit=limiter.limit,
            graded=self._grader.graded,
            grade_faults=self._grader.faulted,
        )

    def _task_set(self, name: str) -> TaskSet:
        task_set = self._catalog.task_set(name)
        if task_set is None:
            known = ", ".join(s.name for s in self._catalog.task_sets) or "none"
            raise NotFound(f"no task set {name!r}; this service has: {known}")
        return task_set

    def _task(self, task_id: str) -> Task:
        task = self._catalog.find(task_id)
        if task is None:
            raise NotFound(f"no task {task_id!r}; ListTasks names those of a set")
        return task


def _start_of(page_token: str) -> int:
    if not page_token:
        return 0
    if not page_token.isascii() or not page_token.isdigit() or len(page_token) > 12:
        raise InvalidArgument(f"page_token {page_token!r} is not one that ListTasks gave")
    return int(page_token)


def eval_service(servicer: EvalServicer) -> Service:
    """The service for a `service_kit.server.Server`."""
    return Service(
        SERVICE_NAME,
        partial(pb_grpc.add_EvalServiceServicer_to_server, servicer),
        on_drain=servicer.drain,
    )
