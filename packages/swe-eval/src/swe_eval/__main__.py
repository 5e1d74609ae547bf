"""`python -m swe_eval`: `serve` the EvalService, `make` and `validate` Harbor tasks."""

from pathlib import Path
from typing import Annotated

import typer
from service_kit.cli import EXIT_USAGE, clear_errors, service_app
from service_kit.errors import StartupError

from swe_eval.app import serve
from swe_eval.config import EvalConfig
from swe_eval.errors import MalformedTaskError
from swe_eval.generate import HarborFolderExistsError, make_task, to_harbor
from swe_eval.tasks.harbor import HarborOptions, find_tasks, read_task

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
    folder: Annotated[Path, typer.Argument(help="A task directory, or a folder of them.")],
) -> None:
    """Read every Harbor task under a folder and report each that can't be used, and why."""
    with clear_errors():
        if not folder.is_dir():
            raise StartupError(f"{folder} is not a folder")
        folders = find_tasks(folder)
        if not folders:
            raise StartupError(f"no folder with a task.toml under {folder}")
        problems = 0
        for task_folder in folders:
            try:
                read_task(task_folder, HarborOptions())
            except MalformedTaskError as error:
                problems += 1
                typer.echo(f"{type(error).__name__.removesuffix('Error')}: {error}")
    typer.echo(f"{len(folders) - problems} of {len(folders)} tasks can be used")
    if problems:
        raise typer.Exit(EXIT_USAGE)


if __name__ == "__main__":
    app()
