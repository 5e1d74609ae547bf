"""EvalService as the holder of tasks and the grader."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator

import grpc
from service_kit.errors import Internal, NotFound
from tailrace.common.v1 import outcome_pb2
from tailrace.eval.v1 import eval_service_pb2 as pb
from tailrace.eval.v1 import eval_service_pb2_grpc as pb_grpc

from rollout_engine import wire
from rollout_engine.patience import Patience
from rollout_engine.peers import EnvironmentRecipe, Grade, Task
from rollout_engine.types import AttemptId

_REMEMBERED_TASKS = 4096


class EvalPeer:
    """Fulfils `peers.Tasks` and `peers.Grader`.

    Args:
        channel: To the EvalService.
        patience: For a service that restarts; all its calls made here are safe to repeat.
        task_timeout_s: Deadline of fetching a task or an environment.
        grade_timeout_s: Deadline of one grading, queueing at the grader included.

    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        patience: Patience,
        task_timeout_s: float,
        grade_timeout_s: float,
    ) -> None:
        self._stub = pb_grpc.EvalServiceStub(channel)
        self._patience = patience
        self._task_timeout_s = task_timeout_s
        self._grade_timeout_s = grade_timeout_s
        self._tasks: OrderedDict[str, Task] = OrderedDict()
        self._fetching: dict[str, asyncio.Lock] = {}

    async def get(self, task_id: str) -> Task:
        """Fetch what an agent may know of a task; remembered, for a group asks many times."""
        found = self._tasks.get(task_id)
        if found is not None:
            return found
        async with self._fetching.setdefault(task_id, asyncio.Lock()):
            try:
                found = self._tasks.get(task_id)
                if found is None:
                    found = await self._patience.call(lambda: self._fetch(task_id), "GetTask")
                    self._tasks[task_id] = found
                    if len(self._tasks) > _REMEMBERED_TASKS:
                        self._tasks.popitem(last=False)
            finally:
                self._fetching.pop(task_id, None)
        return found

    async def environment(self, digest: str) -> bytes:
        """Fetch the tar of a folder tree."""

        async def fetch() -> bytes:
            call = self._stub.GetEnvironment(
                pb.GetEnvironmentRequest(digest=digest), timeout=self._task_timeout_s
            )
            return b"".join([response.tar_chunk async for response in call])

        try:
            return await self._patience.call(fetch, "GetEnvironment")
        except NotFound:
            # A service that restarted has an environment at hand only once its task is asked for.
            found = next((t for t in self._tasks.values() if t.environment.digest == digest), None)
            if found is None:
                raise
            await self._patience.call(lambda: self._fetch(found.task_id), "GetTask")
            return await self._patience.call(fetch, "GetEnvironment")

    async def grade(self, task_id: str, attempt: AttemptId, diff: bytes) -> Grade:
        """Run the task's tests on a diff."""

        async def requests() -> AsyncIterator[pb.GradeRequest]:
            header = pb.GradeHeader(task_id=task_id, attempt=wire.attempt_id_to_proto(attempt))
            yield pb.GradeRequest(header=header)
            for start in range(0, len(diff), wire.MAX_CHUNK_BYTES):
                yield pb.GradeRequest(diff_chunk=diff[start : start + wire.MAX_CHUNK_BYTES])

        async def grade() -> pb.GradeResponse:
            return await self._stub.Grade(requests(), timeout=self._grade_timeout_s)

        response = await self._patience.call(grade, "Grade")
        match response.verdict:
            case outcome_pb2.VERDICT_SOLVED:
                return Grade(solved=True, reason=response.reason)
            case outcome_pb2.VERDICT_UNSOLVED:
                return Grade(solved=False, reason=response.reason)
        raise Internal(f"the grader answered with verdict {response.verdict} for {attempt}")

    async def _fetch(self, task_id: str) -> Task:
        response = await self._stub.GetTask(
            pb.GetTaskRequest(task_id=task_id), timeout=self._task_timeout_s
        )
        task = response.task
        recipe = task.environment
        return Task(
            task_id=task.task_id,
            instruction=task.instruction,
            environment=EnvironmentRecipe(
                digest=recipe.digest,
                image=recipe.image,
                dockerfile=recipe.dockerfile,
                workdir=recipe.workdir,
                env=dict(recipe.env),
                memory_bytes=recipe.memory_bytes,
                cpus=recipe.cpus,
                network=recipe.network,
                forget_history=recipe.forget_history,
            ),
            command_timeout_s=task.command_timeout_s,
        )


__all__ = ["EvalPeer"]
