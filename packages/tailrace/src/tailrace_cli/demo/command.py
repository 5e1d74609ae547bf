"""`tailrace demo`: the stack, the stages, the view, the result."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from rich.console import Console
from rich.table import Table

from tailrace_cli.demo.folder import RunFolder, read_events, write_json
from tailrace_cli.demo.options import DemoOptions
from tailrace_cli.demo.recipes import recipes_of
from tailrace_cli.demo.record import STAGES, RunRecord, fold, kinds_improved, result
from tailrace_cli.demo.services import connect
from tailrace_cli.demo.stages import Demo
from tailrace_cli.demo.traces import collector
from tailrace_cli.live import LiveView
from tailrace_cli.report import write_report
from tailrace_cli.signals import unless_interrupted
from tailrace_cli.stack import StackSpec, Supervisor, load_stack
from tailrace_cli.stack.files import LOCAL_STACK
from tailrace_cli.stack.health import free_ports

HEARTBEAT_S = 1.0
INTERRUPTED = 130


def demo_stack(folder: RunFolder) -> StackSpec:
    """The shipped stack on free ports, with its state in the run's folder."""
    names = ("sandbox", "eval", "weights", "rollout", "trainer")
    *ports, engine_port = free_ports(len(names) + 1)
    addresses = {name: f"127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)}
    return load_stack(
        LOCAL_STACK,
        state_dir=folder.path / "state",
        variables=addresses
        | {"engine_port": str(engine_port), "run": f"demo-{folder.options.seed}"},
        settings=folder.options.service_settings,
    )


def check_options(options: DemoOptions) -> None:
    """Refuses settings that reach nothing, before a folder is made for the run.

    Raises:
        ConfigError: which setting, and why.
    """
    recipes_of(options)
    load_stack(LOCAL_STACK, settings=options.service_settings)


async def run_demo(folder: RunFolder, *, as_json: bool) -> int:
    """Runs or goes on with a demo; prints the table and writes the report.

    Returns:
        Exit code: 0, or 130 after Ctrl-C, when `--resume` goes on.

    Raises:
        StackError: a service cannot start or go on.
    """
    console = Console(stderr=as_json)  # with --json stdout holds the result alone
    record = fold(read_events(folder.path))
    if not record.finished:
        console.print(f"run folder: {folder.path}", highlight=False, soft_wrap=True)
        try:
            finished = await _run_stages(folder, record, console)
        finally:
            folder.close()
            if not record.finished:
                write_report(folder.path)
        if not finished:
            console.print(
                f"stopped; go on with: tailrace demo --resume {folder.path}",
                highlight=False,
                soft_wrap=True,
            )
            return INTERRUPTED
    document = result(record)
    write_json(folder.path / "result.json", document)
    page = write_report(folder.path)
    console.print(table(record), highlight=False)
    improved = kinds_improved(record)
    if improved:
        text = f"kinds of bugs better after rl: {len(improved)} ({', '.join(improved)})"
        console.print(text, highlight=False, soft_wrap=True)
    console.print(f"report: {page}", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(document))
    return 0


async def _run_stages(folder: RunFolder, record: RunRecord, console: Console) -> bool:
    """True when all stages are done, False when the user stopped them."""
    recipes = recipes_of(folder.options)
    started = folder.record(
        "started",
        seed=folder.options.seed,
        steps_total={name: recipe["steps"] for name, recipe in recipes.items()},
        staleness_bound=recipes["rl"]["admission"]["staleness_bound"],
    )
    record.apply(started)
    stack = demo_stack(folder)
    targets = {process.name: process.target for process in stack.processes}

    async def stages() -> None:
        async with Supervisor(stack).running(), connect(targets) as services:
            collect = collector(targets, folder.options)
            await Demo(folder, record, services, collect, view.update).run()

    def interrupted() -> None:
        record.apply(folder.record("stage", name="stopping"))
        view.update()

    with LiveView(record, console) as view:
        async with _heartbeat(folder, record, view):
            return await unless_interrupted(stages(), interrupted)


@contextlib.asynccontextmanager
async def _heartbeat(folder: RunFolder, record: RunRecord, view: LiveView) -> AsyncIterator[None]:
    """Records that the run is alive, so that its wall time is known if it is killed."""

    async def beat() -> None:
        while True:
            record.apply(folder.record("heartbeat"))
            view.update()
            await asyncio.sleep(HEARTBEAT_S)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def table(record: RunRecord) -> Table:
    """The result: one row a stage."""
    shown = Table(title=f"pass@1 on held-out tasks, seed {record.seed}")
    for column in ("stage", "pass@1", "95 % interval", "tasks x attempts", "version"):
        shown.add_column(column)
    for name in STAGES:
        if name in record.evaluations:
            e = record.evaluations[name]
            shown.add_row(
                name,
                f"{e.pass1:.3f}",
                f"{e.ci95[0]:.3f} to {e.ci95[1]:.3f}",
                f"{e.tasks} x {e.attempts}",
                ", ".join(map(str, e.versions)),
            )
    return shown
