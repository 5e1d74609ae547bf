"""`python -m swe_eval`: `serve` the EvalService, `make` and `validate` tasks, read `traces`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from service_kit.cli import EXIT_USAGE, clear_errors, service_app
from service_kit.errors import StartupError

from swe_eval.app import serve
from swe_eval.config import EvalConfig
from swe_eval.core.decontaminate import Overlap, contamination
from swe_eval.errors import MalformedTaskError, TaskSetError
from swe_eval.generate import HarborFolderExistsError, make_task, to_harbor
from swe_eval.tasks.heldout import heldout_facts
from swe_eval.tasks.traces import read_traces, to_atif
from swe_eval.tasks.validate import tell_problems

app = service_app(
    "swe-eval",
    EvalConfig,
    serve,
    summary="Coding tasks, honest grading, and pass@k with error bars: EvalService.",
)

_SPLITS = ("pretrain", "train", "heldout")


@app.command()
def make(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if it is not there.")],
    split: Annotated[str, typer.Option(help="pretrain, train or heldout.")] = "train",
    count: Annotated[int, typer.Option(help="How many tasks.", min=1)] = 10,
    first: Annotated[int, typer.Option(help="Number of the first task.", min=0)] = 0,
) -> None:
    """Write generated tasks as Harbor task directories."""
    with clear_errors():
        if split not in _SPLITS:
            raise StartupError(f"--split: expected one of {', '.join(_SPLITS)}, found {split!r}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(first, first + count):
                to_harbor(make_task(split, number), folder)
        except HarborFolderExistsError as error:
            raise StartupError(str(error)) from error
    typer.echo(f"{count} tasks in {folder}")


@app.command()
def validate(
    paths: Annotated[
        list[Path], typer.Argument(help="Task directories, files of rows, folders of either.")
    ],
) -> None:
    """Read every task at some paths and report each that can't be used, and why."""
    with clear_errors(), _usage_errors():
        if not tell_problems(paths, typer.echo):
            raise typer.Exit(EXIT_USAGE)


@app.command()
def traces(
    location: Annotated[str, typer.Argument(help="File or folder of rows, or hf:OWNER/NAME.")],
    out: Annotated[Path, typer.Argument(help="File to write; it must not be there yet.")],
    solved: Annotated[
        bool, typer.Option("--solved", help="Only traces that are resolved.")
    ] = False,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Tasks for evaluation (Harbor folder, rows, hf:OWNER/NAME): leave out what is of "
            "their repositories or has their text. May be given several times."
        ),
    ] = None,
) -> None:
    """Write traces of Open-SWE-Traces as ATIF, one a line, for supervised fine-tuning."""
    with clear_errors(), _usage_errors():
        if out.exists():
            raise StartupError(f"{out} exists; choose another name")
        shared = _shared(location, against or [])
        written = problems = 0
        with out.open("w", encoding="utf-8") as stream:
            for found in read_traces(location):
                if isinstance(found, MalformedTaskError):
                    problems += 1
                    typer.echo(str(found))
                elif found.trajectory_id in shared:
                    typer.echo(f"left out: {shared[found.trajectory_id]}")
                elif found.resolved or not solved:
                    written += 1
                    stream.write(json.dumps(to_atif(found)) + "\n")
        left_out = f", {len(shared)} left out" if against else ""
        typer.echo(f"{written} traces in {out}{left_out}, {problems} can't be used")
        if problems:
            raise typer.Exit(EXIT_USAGE)


def _shared(location: str, against: list[str]) -> dict[str, Overlap]:
    """Traces of a task that is for evaluation too, by id, each with what they share."""
    heldout = [facts for each in against for facts in heldout_facts(each)]
    training = (
        trace.facts
        for trace in (read_traces(location) if heldout else ())
        if not isinstance(trace, MalformedTaskError)
    )
    return {overlap.training_task: overlap for overlap in contamination(training, heldout)}


@contextmanager
def _usage_errors() -> Iterator[None]:
    try:
        yield
    except (TaskSetError, MalformedTaskError) as error:
        raise StartupError(str(error)) from error


if __name__ == "__main__":
    app()
