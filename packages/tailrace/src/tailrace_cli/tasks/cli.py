"""`tailrace tasks`: make tasks, look through them, test them."""

from __future__ import annotations

import os
import re
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from tailrace_cli.shell import (
    BAD_INPUT,
    AsJson,
    Settings,
    StackFile,
    Variables,
    checked_address,
    fail,
    guarded,
    run,
)
from tailrace_cli.stack import load_stack, parse_variables
from tailrace_cli.stack.files import LOCAL_STACK

tasks = typer.Typer(help="Make tasks, look through them, test them.", no_args_is_help=True)

SandboxTarget = Annotated[
    str | None,
    typer.Option("--sandbox", help="host:port of a sandbox service, instead of one of its own."),
]


@tasks.command("validate")
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
    from tailrace_cli.tasks.validation import validate_tasks

    guarded(lambda: 0 if validate_tasks(paths, as_json=as_json) else BAD_INPUT)


@tasks.command("make")
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
    sandbox_target: SandboxTarget = None,
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

    from tailrace_cli.tasks.making import MakeCommand, checked_kinds, run_make

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


@tasks.command("selftest")
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
    sandbox_target: SandboxTarget = None,
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

    from tailrace_cli.tasks.selftest import SelfTestOptions, run_selftest

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
