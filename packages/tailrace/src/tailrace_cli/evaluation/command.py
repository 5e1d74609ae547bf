"""`tailrace eval`: has a service evaluate, and keeps all that came of it in a folder."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text
from service_kit.channel import ChannelConfig, open_channel
from service_kit.config import ConfigError
from service_kit.errors import AlreadyExists, InvalidArgument, NotFound
from tailrace.eval.v1 import eval_service_pb2 as pb
from tailrace.eval.v1.eval_service_pb2_grpc import EvalServiceStub

from tailrace_cli.demo.folder import FolderError
from tailrace_cli.evaluation.result import (
    OPTIONS,
    RESULT,
    TASKS,
    TRAJECTORIES,
    EvaluationOptions,
    EvaluationResult,
    TaskList,
    save,
)
from tailrace_cli.evaluation.service import fetch_trajectories, follow_evaluation
from tailrace_cli.signals import unless_interrupted

CALL_S = 10.0
INTERRUPTED = 130


def check_out(folder: Path) -> None:
    """Raises `FolderError` if a new evaluation may not be written there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FolderError(
            f"{folder} exists and is not empty; choose another --out, or go on with --resume "
            f"{folder}"
        )


async def run_evaluation(options: EvaluationOptions, folder: Path, *, as_json: bool) -> int:
    """Evaluates, or goes on with an evaluation; the exit code.

    The folder is made once the service has accepted the request: a refused one leaves none.

    Raises:
        ConfigError: the service refuses the request; its words say what was found and expected.
        ServiceError: the service can't be reached, or the evaluation failed.
    """
    console = Console(stderr=as_json)
    finished: list[EvaluationResult] = []

    async def work() -> None:
        try:
            finished.append(await _evaluate(options, folder, console))
        except (InvalidArgument, NotFound, AlreadyExists) as error:
            raise ConfigError(str(error)) from error

    if not await unless_interrupted(work(), lambda: None):
        if (folder / OPTIONS).exists():
            note = f"stopped; go on with: tailrace eval --resume {folder}"
            console.print(note, highlight=False, soft_wrap=True)
        return INTERRUPTED
    (result,) = finished
    show(result, console)
    console.print(f"report: {folder / 'report.html'}", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(result.model_dump(mode="json")))
    return 0 if result.tasks else 1


async def _evaluate(options: EvaluationOptions, folder: Path, console: Console) -> EvaluationResult:
    from tailrace_cli.report.evaluation import write_evaluation_report  # draws: slow to import

    config = ChannelConfig(target=options.target)
    async with open_channel(config, contracts=[pb.DESCRIPTOR]) as channel:
        stub = EvalServiceStub(channel)
        # Once without patience: a service that was never there is told at once.
        await stub.ListTaskSets(pb.ListTaskSetsRequest(), timeout=CALL_S)
        tasks: TaskList | None = None
        with _bar(console) as bar:
            line = bar.add_task("", total=None)
            async for event in follow_evaluation(stub, options.to_request()):
                if isinstance(event, pb.EvaluationPlan):
                    tasks = _begin(folder, options, event, console, known=tasks is not None)
                elif isinstance(event, pb.EvaluationProgress):
                    text = f"solved {event.solved}, faults {event.faults}"
                    bar.update(
                        line,
                        total=event.attempts_total,
                        completed=event.attempts_done,
                        description=text,
                    )
                elif tasks is not None:
                    result = EvaluationResult.from_report(event, options, tasks)
        await fetch_trajectories(stub, options.name, folder / TRAJECTORIES)
    save(folder, RESULT, result)
    write_evaluation_report(folder, result)
    return result


def _begin(
    folder: Path, options: EvaluationOptions, plan: pb.EvaluationPlan, console: Console, known: bool
) -> TaskList:
    tasks = TaskList.from_plan(plan)
    if not known:
        folder.mkdir(parents=True, exist_ok=True)
        save(folder, OPTIONS, options)
        save(folder, TASKS, tasks)
        console.print(
            f"{folder}: {len(tasks.tasks)} tasks x {options.attempts} attempts, {tasks.digest}",
            highlight=False,
            soft_wrap=True,
        )
        if options.pin:
            console.print(f"attempts wait until an engine holds version {options.pin}")
    return tasks


def _bar(console: Console) -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("attempts, {task.description}"),
        console=console,
        transient=True,
    )


def show(result: EvaluationResult, console: Console) -> None:
    """The figures."""
    table = Table("", "estimate", "95 % interval", box=None)
    for entry in result.pass_at:
        low, high = entry.ci95
        table.add_row(f"pass@{entry.k}", f"{entry.estimate:.3f}", f"{low:.3f} to {high:.3f}")
    console.print(table)
    console.print(
        f"{result.tasks} of {result.listed} tasks scored, {result.attempts} attempts each; "
        f"{sum(result.faults.values())} tries ended in faults and count in nothing",
        highlight=False,
        soft_wrap=True,
    )
    for task in result.quarantined:
        console.print(Text(f"left out: {task.task_id}: {task.reason}"), soft_wrap=True)
    console.print(result.claim, highlight=False, soft_wrap=True)
