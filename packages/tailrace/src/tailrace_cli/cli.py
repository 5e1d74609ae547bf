"""The commands: arguments in, exit code out. What they do lives in the packages beside."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

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
    checked_address,
    fail,
    guarded,
    messages,
    run,
)
from tailrace_cli.stack import load_stack, parse_variables
from tailrace_cli.stack.files import LOCAL_STACK

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
tasks_app = typer.Typer(help="Make tasks, look through them, test them.", no_args_is_help=True)
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


@tasks_app.command("validate")
def tasks_validate(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...", help="Task directories, files of rows, folders of either."
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Read every task and report each that can't be used, by file, field and reason.

    Reads Harbor directories, and rows of SWE-bench and SWE-smith in .json, .jsonl and .parquet. A
    task that can't be used stops no other; the exit code is 2 if there is one.
    """
    from tailrace_cli.tasks import validate_tasks

    guarded(lambda: 0 if validate_tasks(paths, as_json=as_json) else BAD_INPUT)


@tasks_app.command("make")
def tasks_make(
    out: Annotated[
        Path, typer.Argument(help="Folder for the task directories; what is there stays.")
    ],
    repository: Annotated[
        Path,
        typer.Option(
            "--from",
            help="A repository with a pytest suite: its folder, or an archive (.tar.gz, .zip).",
        ),
    ],
    count: Annotated[
        int, typer.Option(help="Tasks of this repository and seed in all.", min=1)
    ] = 100,
    seed: Annotated[int, typer.Option(help="Another seed tries other bugs first.", min=0)] = 0,
    kinds: Annotated[
        list[str] | None, typer.Option(help="Kinds of bugs, by commas; default: all.")
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option(help="Only files for bugs that match a glob; repeatable.")
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="No bugs in, and no tests of, what matches a glob; repeatable."),
    ] = None,
    per_function: Annotated[
        int, typer.Option(help="Most tasks of one function; 0: any number.", min=0)
    ] = 3,
    per_file: Annotated[
        int, typer.Option(help="Most tasks of one file; 0: any number.", min=0)
    ] = 0,
    test_timeout: Annotated[
        float, typer.Option(help="Seconds that one run of the suite may take.", min=1.0)
    ] = 60.0,
    jobs: Annotated[
        int | None, typer.Option(help="Sandboxes at once; default: the cores.", min=1)
    ] = None,
    name: Annotated[str, typer.Option(help="Of the repository; default: its folder's.")] = "",
    python: Annotated[
        Path | None,
        typer.Option(
            help="Interpreter or virtual environment with pytest and what else the tests need; "
            "default: this one, with pytest alone."
        ),
    ] = None,
    llm_url: Annotated[
        str, typer.Option(help="OpenAI-compatible endpoint (.../v1) that words the issues.")
    ] = "",
    llm_model: Annotated[str, typer.Option(help="Model at --llm-url.")] = "",
    sandbox_target: Annotated[
        str | None,
        typer.Option(
            "--sandbox", help="host:port of a sandbox service, instead of one of its own."
        ),
    ] = None,
    stack: StackFile = LOCAL_STACK,
    var: Variables = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Make tasks from a repository: bugs that its tests notice, as Harbor task directories.

    The same repository, seed and options give the same tasks. Tasks that are there already count
    and are not made again: after Ctrl-C the same command goes on, with a larger --count it adds.
    The exit code is 1 if there are fewer than --count. A key for --llm-url is read from
    TAILRACE_LLM_KEY.
    """
    from swe_eval.making.maker import MakeOptions
    from swe_eval.making.words import ChatWriter

    from tailrace_cli.making import MakeCommand, checked_kinds, run_make

    if bool(llm_url) != bool(llm_model):
        fail("--llm-url and --llm-model go together", BAD_INPUT)
    if llm_url and not re.match(r"https?://[^/]", llm_url):
        fail(f"--llm-url {llm_url}: expected an address with http:// or https://", BAD_INPUT)

    def work() -> Coroutine[Any, Any, int]:
        spec = load_stack(stack, variables=parse_variables(var or ()), settings=settings or ())
        if sandbox_target is not None:
            checked_address("--sandbox", sandbox_target)
        key = os.environ.get("TAILRACE_LLM_KEY", "")
        writer = ChatWriter(url=llm_url, model=llm_model, key=key) if llm_url else None
        options = MakeOptions(
            count=count,
            seed=seed,
            kinds=checked_kinds(kinds or ()),
            include=tuple(include or ()),
            exclude=tuple(exclude or ()),
            per_function=per_function,
            per_file=per_file,
            timeout_s=test_timeout,
            jobs=jobs or os.cpu_count() or 1,
        )
        command = MakeCommand(
            repository=repository,
            out=out,
            name=name,
            python=python,
            sandbox=sandbox_target,
            writer=writer,
        )
        return run_make(command, options, spec, as_json=as_json)

    run(work)


@tasks_app.command("selftest")
def tasks_selftest(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[PATH]...", help="Task directories, files of rows, folders of either."
        ),
    ] = None,
    task_set: Annotated[
        str, typer.Option(help="Instead of paths: a task set of the stack, with its limits.")
    ] = "",
    environment: Annotated[
        str,
        typer.Option(
            help="How Harbor's Dockerfiles become environments: auto, tree (over the host's root, "
            "RUN lines left out) or image."
        ),
    ] = "auto",
    repeat: Annotated[
        int, typer.Option(help="How often to grade the gold patch, and no patch.", min=1)
    ] = 2,
    jobs: Annotated[int, typer.Option(help="Tasks at once.", min=1)] = 8,
    out: Annotated[
        Path, typer.Option(help="File of the results; one that is there is gone on with.")
    ] = Path("selftest.jsonl"),
    sandbox_target: Annotated[
        str | None,
        typer.Option(
            "--sandbox", help="host:port of a sandbox service, instead of one of its own."
        ),
    ] = None,
    stack: StackFile = LOCAL_STACK,
    var: Variables = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Test every task before a run: its gold patch has to solve it and no patch must not.

    Each is graded several times, in sandboxes, as an agent's work is. A task that fails, or whose
    tests do not end the same way each time, is quarantined with the reason; a task set leaves it
    out with quarantine = "FILE". The exit code is 1 if not every task was kept.
    """
    from swe_eval.tasks.harbor import EnvironmentMode

    from tailrace_cli.selftest import SelfTestOptions, run_selftest

    modes = [str(mode) for mode in EnvironmentMode]
    if environment not in modes:
        fail(f"--environment: expected {', '.join(modes)}, found {environment!r}", BAD_INPUT)
    if bool(paths) == bool(task_set):
        found = "found both" if paths else "found neither"
        fail(f"name paths to tasks, or a set by --task-set; {found}", BAD_INPUT)

    def work() -> Coroutine[Any, Any, int]:
        spec = load_stack(stack, variables=parse_variables(var or ()), settings=settings or ())
        if sandbox_target is not None:
            checked_address("--sandbox", sandbox_target)
        options = SelfTestOptions(
            paths=paths or (),
            environment=EnvironmentMode(environment),
            task_set=task_set,
            out=out,
            repeat=repeat,
            jobs=jobs,
            sandbox=sandbox_target,
        )
        return run_selftest(options, spec, as_json=as_json)

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
