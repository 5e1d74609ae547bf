"""Runs the scripted expert over training tasks in real sandboxes and writes its traces as ATIF.

The expert is graded like anyone else: a trace's `solved` is the hidden tests' verdict.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from sandbox_client.client import Sandbox, SandboxClient
from sandbox_client.types import Command, EnvironmentRef, ExecResult
from service_kit.channel import ChannelConfig, open_channel
from tailrace.common.v1 import outcome_pb2
from tailrace.eval.v1 import eval_service_pb2 as eval_pb
from tailrace.eval.v1.eval_service_pb2_grpc import EvalServiceStub

from tailrace_cli.demo.expert import SUBMIT, Explorer
from tailrace_cli.demo.options import DemoOptions

CONCURRENCY = 16
MAX_COMMANDS = 8
CALL_S = 30.0
GRADE_S = 120.0
PROGRESS_EVERY = 50


@dataclass(frozen=True)
class Turn:
    """One command of the expert and what it printed; the last one, `submit`, prints nothing."""

    command: str
    observation: str | None


def observation(result: ExecResult) -> str:
    """What an agent sees of a command: its output without the last newline, and nothing else."""
    return (result.stdout + result.stderr).rstrip("\n")


def atif(task_id: str, instruction: str, turns: list[Turn], solved: bool) -> dict[str, Any]:
    """A trace as an ATIF v1.8 trajectory."""
    steps: list[dict[str, Any]] = [{"step_id": 1, "source": "user", "message": instruction}]
    for turn in turns:
        step: dict[str, Any] = {
            "step_id": len(steps) + 1,
            "source": "agent",
            "message": turn.command,
        }
        if turn.observation is not None:
            step["observation"] = {"results": [{"content": turn.observation}]}
        steps.append(step)
    return {
        "schema_version": "ATIF-v1.8",
        "session_id": task_id,
        "agent": {"name": "scripted-explorer", "version": "1"},
        "steps": steps,
        "extra": {"task_id": task_id, "solved": solved},
    }


class Collector:
    """Collects traces with the services of one stack."""

    def __init__(
        self, evaluator: grpc.aio.Channel, sandboxes: SandboxClient, options: DemoOptions
    ) -> None:
        self._eval = EvalServiceStub(evaluator)
        self._sandboxes = sandboxes
        self._options = options

    async def collect(self, file: Path, progress: Callable[[int, int], None]) -> None:
        """Writes `file` whole or not at all; calls `progress(done, total)` now and then."""
        wanted = self._options.traces
        task_ids = await self._task_ids(wanted)
        places = asyncio.Semaphore(CONCURRENCY)
        traces: dict[int, dict[str, Any]] = {}

        async def one(index: int, task_id: str) -> None:
            async with places:
                traces[index] = await self._trace(task_id)
            if len(traces) % PROGRESS_EVERY == 0 or len(traces) == wanted:
                progress(len(traces), wanted)

        progress(0, wanted)
        async with asyncio.TaskGroup() as group:
            for index, task_id in enumerate(task_ids):
                group.create_task(one(index, task_id))
        temporary = file.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(traces[i]) + "\n" for i in sorted(traces)))
        temporary.replace(file)

    async def _task_ids(self, wanted: int) -> list[str]:
        found: list[str] = []
        token = ""
        while len(found) < wanted:
            request = eval_pb.ListTasksRequest(
                task_set="train", page_size=min(1000, wanted - len(found)), page_token=token
            )
            page = await self._eval.ListTasks(request, timeout=CALL_S)
            found += [task.task_id for task in page.tasks]
            token = page.next_page_token
            if not token:
                break
        if len(found) < wanted:
            raise ValueError(f"the task set 'train' has {len(found)} tasks, {wanted} are wanted")
        return found

    async def _trace(self, task_id: str) -> dict[str, Any]:
        reply = await self._eval.GetTask(eval_pb.GetTaskRequest(task_id=task_id), timeout=CALL_S)
        task = reply.task
        await self._put_environment(task.environment.digest)
        environment = EnvironmentRef(
            tree_digest=task.environment.digest, workdir=task.environment.workdir
        )
        # The seed is of the run and the task alone: traces do not depend on who finishes first.
        rng = random.Random(f"{self._options.seed}-{task_id}")  # noqa: S311 - not for secrets
        async with await self._sandboxes.create(environment) as sandbox:
            turns = await _explore(Explorer(task.instruction, rng), sandbox)
            diff = await sandbox.diff()
        solved = await self._solved(task_id, diff)
        return atif(task_id, task.instruction, turns, solved)

    async def _put_environment(self, digest: str) -> None:
        if not await self._sandboxes.missing_environments([digest]):
            return
        chunks = [
            chunk.tar_chunk
            async for chunk in self._eval.GetEnvironment(
                eval_pb.GetEnvironmentRequest(digest=digest), timeout=CALL_S
            )
        ]
        await self._sandboxes.put_environment_tar(digest, b"".join(chunks))

    async def _solved(self, task_id: str, diff: bytes) -> bool:
        async def parts() -> AsyncIterator[eval_pb.GradeRequest]:
            yield eval_pb.GradeRequest(header=eval_pb.GradeHeader(task_id=task_id))
            yield eval_pb.GradeRequest(diff_chunk=diff)

        grade = await self._eval.Grade(parts(), timeout=GRADE_S)
        return bool(grade.verdict == outcome_pb2.VERDICT_SOLVED)


async def _explore(explorer: Explorer, sandbox: Sandbox) -> list[Turn]:
    turns: list[Turn] = []
    seen: str | None = None
    for _ in range(MAX_COMMANDS):
        command = explorer.next_command(seen)
        if command == SUBMIT:
            return [*turns, Turn(command, None)]
        seen = observation(await sandbox.run(Command(shell=command)))
        turns.append(Turn(command, seen))
    return turns


def collector(
    targets: Mapping[str, str], options: DemoOptions
) -> Callable[[Path, Callable[[int, int], None]], Awaitable[None]]:
    """What the demo's stages call to collect traces."""

    async def collect(file: Path, progress: Callable[[int, int], None]) -> None:
        async with (
            open_channel(ChannelConfig(target=targets["eval"])) as evaluator,
            SandboxClient(ChannelConfig(target=targets["sandbox"]), owner="expert") as sandboxes,
        ):
            await Collector(evaluator, sandboxes, options).collect(file, progress)

    return collect
