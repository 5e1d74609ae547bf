"""The options of `tailrace eval` and `tailrace eval compare`."""

from __future__ import annotations

import json
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from service_kit.config import ConfigError

from tailrace_cli.shell import (
    BAD_INPUT,
    AsJson,
    StackFile,
    Target,
    Variables,
    checked_address,
    fail,
    guarded,
    run,
)
from tailrace_cli.stack import load_stack, parse_variables
from tailrace_cli.stack.files import LOCAL_STACK

evaluation = typer.Typer(help="Measure a policy on held-out tasks, and compare two runs.")

_WITH_RESUME = {"resume", "stack", "var", "target", "as_json"}


@evaluation.callback(invoke_without_command=True)
def evaluate(
    context: typer.Context,
    task_set: Annotated[str, typer.Option(help="Task set of the service.")] = "heldout",
    tasks: Annotated[int, typer.Option(help="Size of the stratified sample; 0: all tasks.")] = 0,
    task_list: Annotated[
        Path | None,
        typer.Option("--list", help="Exact list instead: a saved tasks.json, or one id a line."),
    ] = None,
    task_seed: Annotated[int, typer.Option(help="Seed of the sample.")] = 0,
    stratify: Annotated[
        str,
        typer.Option(
            help="Columns of the tasks that make a stratum, such as repository,difficulty; "
            "default: those of the set."
        ),
    ] = "",
    attempts: Annotated[int, typer.Option(help="Attempts at each task.")] = 4,
    pin: Annotated[
        int,
        typer.Option(
            help="Weight version that every token must come from; 0: whatever the engines hold, "
            "and then the number is no checkpoint's score."
        ),
    ] = 0,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="host:port of a rollout-engine to run the attempts, repeatable; default: those "
            "the service is configured with."
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0: greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling of tokens.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the result; default: runs/eval-<time>.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on with the evaluation in this folder, with its own options."),
    ] = None,
    stack: StackFile = LOCAL_STACK,
    var: Variables = None,
    target: Target = None,
    as_json: AsJson = False,
) -> None:
    """Measure a policy: pass@k with 95 % intervals, by stratum, faults apart.

    Needs a running stack (`tailrace up`), or an EvalService named by --target.
    """
    if context.invoked_subcommand is not None:
        return
    from tailrace_cli.evaluation.command import check_out, run_evaluation
    from tailrace_cli.evaluation.result import (
        OPTIONS,
        EvaluationOptions,
        evaluation_name,
        load,
        read_task_list,
    )

    if resume is not None:
        given = [o for o in context.command.params if _was_given(context, o.name)]
        names = [option.opts[0] for option in given if option.name not in _WITH_RESUME]
        if names:
            message = f"--resume goes on with its folder's options; leave out {', '.join(names)}"
            fail(message, BAD_INPUT)

    def prepare() -> tuple[EvaluationOptions, Path]:
        where = None
        if resume is None or target is not None:
            where = _address(stack, var, target)
        if resume is not None:
            options = load(resume, OPTIONS, EvaluationOptions)
            return (options.model_copy(update={"target": where}) if where else options), resume
        folder = out or Path("runs") / time.strftime("eval-%Y%m%d-%H%M%S")
        check_out(folder)
        try:
            options = EvaluationOptions(
                name=evaluation_name(folder, str(time.time_ns())),
                target=where or "",
                task_set=task_set,
                tasks=tasks,
                task_seed=task_seed,
                stratify_by=tuple(name.strip() for name in stratify.split(",") if name.strip()),
                task_ids=() if task_list is None else read_task_list(task_list),
                attempts=attempts,
                pin=pin,
                engines=tuple(checked_address("--engine", address) for address in engine or ()),
                temperature=temperature,
                top_p=top_p,
                sampling_seed=seed,
            )
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise ConfigError("; ".join(wrong)) from error
        return options, folder

    def work() -> Coroutine[Any, Any, int]:
        options, folder = prepare()
        return run_evaluation(options, folder, as_json=as_json)

    run(work)


@evaluation.command()
def compare(
    run_a: Annotated[Path, typer.Argument(help="Folder of an evaluation.")],
    run_b: Annotated[Path, typer.Argument(help="Folder of another one on the same tasks.")],
    as_json: AsJson = False,
) -> None:
    """Compare two runs on the tasks that both scored: B - A, its interval, and a p-value."""
    from tailrace_cli.evaluation.compare import compare as compare_results
    from tailrace_cli.evaluation.compare import show_comparison
    from tailrace_cli.evaluation.result import RESULT, EvaluationResult, load

    def work() -> int:
        a, b = (load(folder, RESULT, EvaluationResult) for folder in (run_a, run_b))
        found = compare_results(a, b)
        if as_json:
            print(json.dumps(found.as_dict()))
        else:
            show_comparison(found, Console())
        return 0

    guarded(work)


def _was_given(context: typer.Context, name: str | None) -> bool:
    source = context.get_parameter_source(name or "")
    return source is not None and source.name == "COMMANDLINE"


def _address(stack: Path, variables: list[str] | None, target: str | None) -> str:
    if target is not None:
        return checked_address("--target", target)
    spec = load_stack(stack, variables=parse_variables(variables or ()))
    found = [process.target for process in spec.processes if process.module == "swe_eval"]
    if not found:
        raise ConfigError(
            f"stack {spec.name!r} has no evaluation service (module swe_eval); name one by "
            "--target host:port"
        )
    return found[0]
