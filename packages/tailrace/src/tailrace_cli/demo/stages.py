"""The demo's stages: base, SFT on expert traces, asynchronous GRPO; each is evaluated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from tailrace.eval.v1 import eval_service_pb2 as eval_pb

from tailrace_cli.demo.folder import RunFolder
from tailrace_cli.demo.options import Control, DemoOptions
from tailrace_cli.demo.recipes import as_toml, recipes_of
from tailrace_cli.demo.record import RunRecord
from tailrace_cli.demo.services import (
    StageBegan,
    StageEnd,
    StageEvent,
    StageNote,
    StageStep,
    StageVersion,
)

EVALUATION_RESERVE_S = 60.0
"""Kept back from `--minutes` for the last evaluation."""

ACTIVITY_EVERY_S = 3.0

TraceCollector = Callable[[Path, Callable[[int, int], None]], Awaitable[None]]
"""Writes expert traces into a file, whole or not at all; see traces.py."""


class DemoServices(Protocol):
    """What the stages ask of the services; `services.Services` over real channels."""

    async def publish(self, stage: str) -> int:
        """Publishes a stage's weights and waits until the engines serve them; their number."""
        ...

    async def await_version(self, number: int) -> None:
        """Waits until the engines serve a version."""
        ...

    def evaluate(
        self, request: eval_pb.EvaluateRequest
    ) -> AsyncIterator[eval_pb.EvaluationProgress | eval_pb.EvaluationReport]:
        """Progress, and the report last."""
        ...

    def follow_stage(
        self, name: str, recipe_toml: str, *, cursor: int
    ) -> AsyncIterator[StageEvent]:
        """Starts or resumes a stage and follows it to its end, from the event after a cursor on."""
        ...

    async def stop_stage(self, name: str) -> None:
        """Ends a stage after its present step."""
        ...

    async def activity(self) -> tuple[int, int] | None:
        """Groups in flight, and groups ready to be trained."""
        ...


class Demo:
    """Runs what the run's record says is still to be done."""

    def __init__(
        self,
        folder: RunFolder,
        record: RunRecord,
        services: DemoServices,
        collect_traces: TraceCollector,
        on_change: Callable[[], None],
    ) -> None:
        self._folder = folder
        self._record = record
        self._services = services
        self._collect_traces = collect_traces
        self._on_change = on_change
        self._options: DemoOptions = folder.options
        self._recipes = recipes_of(folder.options)

    async def run(self) -> None:
        """All stages in order; on a resumed run only what is missing."""
        async with asyncio.TaskGroup() as group:
            # The base is scored while the trainer learns from traces: it publishes nothing then.
            if "base" not in self._record.evaluations:
                version = await self._serve("base")
                group.create_task(self._evaluate("base", version))
            group.create_task(self._sft())
        if "sft" not in self._record.evaluations:
            await self._evaluate("sft", await self._serve("sft"))
        if self._options.control is not Control.MORE_SFT:
            await self._rl()
        self._emit("finished")

    def _emit(self, kind: str, **fields: Any) -> None:
        self._record.apply(self._folder.record(kind, **fields))
        self._on_change()

    async def _serve(self, stage: str) -> int:
        """Has the engines serve a stage's weights; returns their version.

        An evaluation that a stop cut short goes on at the version it was begun with, unless a newer
        one has been published since.
        """
        begun = self._record.scored_versions.get(stage)
        if begun is not None and begun == self._record.newest_version:
            await self._services.await_version(begun)
            return begun
        number = await self._services.publish(stage)
        self._emit("version", number=number, step=0, stage=stage)
        return number

    async def _evaluate(self, name: str, version: int) -> None:
        self._emit("stage", name=f"evaluating {name}")
        self._emit("evaluation_begun", name=name, version=version)
        request = eval_pb.EvaluateRequest(
            # An evaluation is of one version: the same name goes on with what is there.
            name=f"{name}-v{version}",
            task_set="heldout",
            tasks=self._options.eval_tasks,
            task_seed=0,
            attempts=self._options.eval_attempts,
            version=version,
            sampling=eval_pb.EvaluationSampling(
                temperature=1.0, top_p=1.0, seed=1_000_003 * (self._options.seed + 1)
            ),
        )
        async for event in self._services.evaluate(request):
            if isinstance(event, eval_pb.EvaluationProgress):
                self._emit(
                    "evaluation_progress",
                    name=name,
                    done=event.attempts_done,
                    total=event.attempts_total,
                    solved=event.solved,
                )
            else:
                self._emit("evaluation", name=name, **_evaluation_fields(event))

    async def _sft(self) -> None:
        traces = self._folder.path / "traces.jsonl"
        if not traces.exists():
            self._emit("stage", name="expert traces")
            await self._collect_traces(
                traces, lambda done, total: self._emit("traces", done=done, total=total)
            )
        await self._stage(
            "sft", as_toml(self._recipes["sft"] | {"traces": [str(traces.resolve())]})
        )

    async def _rl(self) -> None:
        if "rl" in self._record.evaluations:
            return
        budget = None
        if self._options.minutes is not None:
            budget = self._options.minutes * 60 - EVALUATION_RESERVE_S - self._record.wall_s
        await self._stage("rl", as_toml(self._recipes["rl"]), budget_s=budget)
        await self._evaluate("rl", await self._serve("rl"))

    async def _stage(self, name: str, recipe: str, budget_s: float | None = None) -> None:
        """Runs a stage to its end, or stops it when its time is used up."""
        self._emit("stage", name=name)
        began = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            timer = group.create_task(self._stop_after(name, began, budget_s))
            activity = group.create_task(self._show_activity())
            await self._follow(name, recipe, began)
            timer.cancel()
            activity.cancel()

    async def _stop_after(self, name: str, began: asyncio.Event, budget_s: float | None) -> None:
        if budget_s is None:
            return
        await asyncio.sleep(max(budget_s, 0.0))
        await began.wait()  # nobody can stop what has not started
        self._emit("note", text=f"time is up: stopping stage {name} after its present step")
        await self._services.stop_stage(name)

    async def _show_activity(self) -> None:
        while True:
            await asyncio.sleep(ACTIVITY_EVERY_S)
            groups = await self._services.activity()
            if groups is not None and any(groups):
                self._emit("activity", in_flight=groups[0], ready=groups[1])

    async def _follow(self, name: str, recipe: str, began: asyncio.Event) -> None:
        seen = self._record.cursors.get(name, 0)
        async for event in self._services.follow_stage(name, recipe, cursor=seen):
            match event:
                case StageBegan(step):
                    began.set()
                    if step:
                        self._emit("note", text=f"stage {name} goes on from step {step}")
                case StageStep(at, step, values, counts):
                    self._emit(
                        "step", stage=name, cursor=at, step=step, values=values, counts=counts
                    )
                case StageVersion(at, number, step):
                    self._emit("version", stage=name, cursor=at, number=number, step=step)
                case StageNote(at, text):
                    self._emit("note", stage=name, cursor=at, text=text)
                case StageEnd(state, steps):
                    self._emit("stage_ended", name=name, state=state, steps=steps)


def _evaluation_fields(report: eval_pb.EvaluationReport) -> dict[str, Any]:
    return {
        "pass1": report.pass_at_1,
        "ci95": [report.pass_at_1_ci95.low, report.pass_at_1_ci95.high],
        "pass_at_k": report.pass_at_k,
        "tasks": report.tasks,
        "attempts": report.attempts,
        "outcomes": dict(report.outcomes),
        "by_kind": [
            {"name": k.name, "tasks": k.tasks, "pass_rate": k.pass_rate} for k in report.by_kind
        ],
        "versions": list(report.versions),
        "task_list_digest": report.task_list_digest,
        "by_task": [[t.task_id, t.solved, t.attempts] for t in report.by_task],
    }
