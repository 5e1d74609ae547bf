"""The commands: arguments in, exit code out. What they do lives in the packages beside."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console

from tailrace_cli.demo.folder import RunFolder
from tailrace_cli.demo.options import Control, DemoOptions
from tailrace_cli.evaluation.cli import evaluation
from tailrace_cli.shell import (
    BAD_INPUT,
    AsJson,
    Settings,
    StackFile,
    StateFolder,
    Target,
    Variables,
    fail,
    guarded,
    messages,
    run,
)
from tailrace_cli.stack import load_stack, parse_variables
from tailrace_cli.stack.files import LOCAL_STACK
from tailrace_cli.tasks.cli import tasks as tasks_app

app = typer.Typer(
    help="Fully asynchronous reinforcement learning for coding agents.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
sandbox = typer.Typer(
    help="Look at the sandboxes of a running stack, end them, see their limits.",
    no_args_is_help=True,
)
app.add_typer(sandbox, name="sandbox")
app.add_typer(tasks_app, name="tasks")
app.add_typer(evaluation, name="eval")

Owner = Annotated[str, typer.Option(help="Only sandboxes that this owner has created.")]


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Seed of the whole run.", min=0)] = 0,
    steps: Annotated[
        int | None,
        typer.Option(help="Optimizer steps of the learning stage; 10 gives a short look."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="End the learning stage in time to finish in so many minutes."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; default: runs/demo-<time>-seed<n>.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder, with its own options.")
    ] = None,
    sync: Annotated[
        bool, typer.Option("--sync", help="Synchronous: every step waits for all its attempts.")
    ] = False,
    control: Annotated[Control, typer.Option(help="Run a control experiment.")] = Control.NONE,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, as the last line of stdout.")
    ] = False,
    tasks: Annotated[int | None, typer.Option(help="Held-out tasks of each evaluation.")] = None,
    traces: Annotated[int | None, typer.Option(help="Expert traces for SFT.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Setting of a service or a recipe (sft, rl): name.dotted.key=value; repeatable.",
        ),
    ] = None,
) -> None:
    """Train a tiny coding agent on this machine: base, SFT, asynchronous GRPO, each evaluated."""
    from tailrace_cli.demo.command import check_options, run_demo

    chosen = {
        "seed": seed,
        "steps": steps,
        "minutes": minutes,
        "sync": sync,
        "control": control,
        "eval_tasks": tasks,
        "traces": traces,
        "overrides": tuple(settings or ()),
    }
    if resume is not None and out is not None:
        fail("--resume names the run's folder already; leave out --out", BAD_INPUT)
    try:
        options = DemoOptions.model_validate({k: v for k, v in chosen.items() if v is not None})
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        fail("; ".join(wrong), BAD_INPUT)

    def folder() -> RunFolder:
        if resume is not None:
            return RunFolder.resume(resume, time.time)
        check_options(options)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        return RunFolder.create(
            out or Path("runs") / f"demo-{stamp}-seed{seed}", options, time.time
        )

    run(lambda: run_demo(folder(), as_json=as_json))


@app.command()
def up(
    stack: StackFile = LOCAL_STACK,
    state: StateFolder = None,
    var: Variables = None,
    settings: Settings = None,
) -> None:
    """Start every service of a stack and keep it running until Ctrl-C."""
    from tailrace_cli.stack.command import run_up

    run(
        lambda: run_up(
            load_stack(
                stack,
                state_dir=state,
                variables=parse_variables(var or ()),
                settings=settings or (),
            ),
            messages,
        )
    )


@app.command()
def status(
    stack: StackFile = LOCAL_STACK,
    var: Variables = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the services of a running stack: health, versions, queues and limits.

    A running stack, a demo's too, has left its own file: --stack STATE_FOLDER/resolved-stack.toml.
    """
    from tailrace_cli.status import collect, show

    async def work() -> int:
        report = await collect(load_stack(stack, variables=parse_variables(var or ())))
        if as_json:
            print(json.dumps(report.as_dict()))
        else:
            show(report, Console())
        return 0 if report.healthy else 1

    run(work)


@app.command()
def doctor(
    stack: StackFile = LOCAL_STACK,
    var: Variables = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this host and say how to mend what is missing."""
    from tailrace_cli.doctor import as_dict, examine, passed, show

    def work() -> int:
        findings = examine(load_stack(stack, variables=parse_variables(var or ())))
        if as_json:
            print(json.dumps(as_dict(findings)))
        else:
            show(findings, Console())
        return 0 if passed(findings) else 1

    guarded(work)


@sandbox.command("ls")
def sandbox_ls(
    stack: StackFile = LOCAL_STACK,
    var: Variables = None,
    target: Target = None,
    owner: Owner = "",
    as_json: AsJson = False,
) -> None:
    """List the living sandboxes: owner, age, what is left of their lease."""
    from tailrace_cli.sandboxes import Services, as_rows, show_sandboxes, targets

    async def work() -> int:
        places = targets(load_stack(stack, variables=parse_variables(var or ())), target)
        async with Services.connected(places, owner) as services:
            found = await services.sandboxes()
        if as_json:
            print(json.dumps(as_rows(found)))
        else:
            show_sandboxes(found, Console())
        return 0

    run(work)


@sandbox.command("kill")
def sandbox_kill(
    ids: Annotated[list[str] | None, typer.Argument(help="Sandboxes to end.")] = None,
    every: Annotated[bool, typer.Option("--all", help="End all of them.")] = False,
    stack: StackFile = LOCAL_STACK,
    var: Variables = None,
    target: Target = None,
    owner: Owner = "",
    as_json: AsJson = False,
) -> None:
    """End sandboxes with all that runs in them; exit code 1 if one was not there."""
    from tailrace_cli.sandboxes import Services, targets

    if bool(ids) == (every or bool(owner)):
        fail("name the sandboxes to end, or use --all or --owner NAME; not both", BAD_INPUT)

    async def work() -> int:
        places = targets(load_stack(stack, variables=parse_variables(var or ())), target)
        async with Services.connected(places, owner) as services:
            chosen = ids or [info.sandbox_id for _, info in await services.sandboxes()]
            ended = await services.kill(chosen)
        if as_json:
            print(json.dumps(ended))
        else:
            for sandbox_id, existed in ended.items():
                print(f"{sandbox_id} {'ended' if existed else 'was not there'}")
        return 0 if all(ended.values()) else 1

    run(work)


@sandbox.command("df")
def sandbox_df(
    stack: StackFile = LOCAL_STACK,
    var: Variables = None,
    target: Target = None,
    as_json: AsJson = False,
) -> None:
    """Show how much of every limit is used up: sandboxes, starts, commands, disk space."""
    from tailrace_cli.sandboxes import Services, as_rows, show_limits, targets

    async def work() -> int:
        places = targets(load_stack(stack, variables=parse_variables(var or ())), target)
        async with Services.connected(places) as services:
            found = await services.limits()
        if as_json:
            print(json.dumps(as_rows(found)))
        else:
            show_limits(found, Console())
        return 0

    run(work)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a demo run, finished or not.")],
) -> None:
    """Write a run's report.html again, from its recorded events."""
    from tailrace_cli.report import write_report

    def work() -> int:
        print(write_report(folder))
        return 0

    guarded(work)


def main() -> None:
    """Entry point."""
    app(prog_name="tailrace")
