"""Where tasks are read from: Harbor directories and rows of data sets, one after the other.

A source yields a task, or in its place the error that says why it can't be used. Only what stops
the whole source is raised.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from swe_eval.config import HarborSetConfig, ReadSetConfig
from swe_eval.errors import MalformedTaskError, TaskSetError
from swe_eval.tasks import swebench, swesmith
from swe_eval.tasks.fields import Fields
from swe_eval.tasks.harbor import EnvironmentMode, HarborOptions, find_tasks, read_task
from swe_eval.tasks.kinds import kind_of
from swe_eval.tasks.rows import read_file, read_rows, row_files
from swe_eval.tasks.task import Task


@dataclass(frozen=True, slots=True)
class Found:
    """A task, and where it stands."""

    task: Task
    file: str
    """Of a row its file, else the task's folder."""
    line: int = 0
    """Of a row, from 1."""


TaskSource = Iterator[Found | MalformedTaskError]
"""Tasks in order, and errors in the place of those that can't be used."""


def source_of(config: ReadSetConfig) -> TaskSource:
    """The source of a configured set.

    Raises:
        TaskSetError: there is none.
    """
    if isinstance(config, HarborSetConfig):
        mode = EnvironmentMode(config.environment)
        options = HarborOptions(
            environment=mode,
            max_task_bytes=config.max_task_bytes,
            keep_history=config.keep_history,
        )
        return harbor_tasks(config.path, options)
    rows = read_rows(config.location, split=config.split)
    profiles = swesmith.read_profiles(config.profiles) if config.profiles else {}
    wall_s = config.test_wall_s
    if config.kind == "swebench":
        return (_read(row, lambda r: swebench.read_task(r, wall_s=wall_s)) for row in rows)
    return (_read(row, lambda r: swesmith.read_task(r, profiles, wall_s=wall_s)) for row in rows)


def harbor_tasks(path: Path, options: HarborOptions | None = None) -> TaskSource:
    """The task directories at or under a folder.

    Raises:
        TaskSetError: there is none.
    """
    if not path.is_dir():
        raise TaskSetError(f"{path} is not a folder")
    folders = find_tasks(path)
    if not folders:
        raise TaskSetError(f"no folder with a task.toml under {path}")
    return (_read_folder(folder, options) for folder in folders)


def tasks_at(path: Path, options: HarborOptions | None = None) -> TaskSource:
    """All tasks at a path, whatever their kind: a file of rows, or a folder of tasks and files.

    Args:
        path: The file or folder.
        options: How to read Harbor's directories.

    Raises:
        TaskSetError: there is neither a task nor a file of rows.
    """
    folders, files = places_at(path)
    return itertools.chain(
        (_read_folder(folder, options) for folder in folders),
        (_read(row, _read_unknown) for file in files for row in read_file(file)),
    )


def places_at(path: Path) -> tuple[list[Path], list[Path]]:
    """The task directories at a path, and the files of rows that are in none of them.

    Raises:
        TaskSetError: there is neither.
    """
    folders = find_tasks(path) if path.is_dir() else []
    inside = tuple(f"{folder}/" for folder in folders)
    files = [file for file in row_files(path) if not str(file).startswith(inside)]
    if not folders and not files:
        what = "is no .json, .jsonl or .parquet file" if path.is_file() else "is not there"
        if path.is_dir():
            what = "no folder with a task.toml and no .json, .jsonl or .parquet file in it"
        raise TaskSetError(f"{path}: {what}")
    return folders, files


def without_twins(source: Iterable[Found | MalformedTaskError]) -> TaskSource:
    """The same, with an error for each task whose id another one has taken."""
    taken: set[str] = set()
    for found in source:
        if isinstance(found, Found) and found.task.task_id in taken:
            yield twin(found)
            continue
        if isinstance(found, Found):
            taken.add(found.task.task_id)
        yield found


def twin(found: Found) -> MalformedTaskError:
    """The error for a task whose id another one has taken."""
    return MalformedTaskError(
        task=found.task.task_id if found.line else Path(found.file).name,
        file=found.file if found.line else "task.toml",
        line=found.line,
        field="instance_id" if found.line else "task.name",
        expected="a name of its own",
        found=f"{found.task.task_id!r}, the name of another task",
    )


def _read_folder(folder: Path, options: HarborOptions | None) -> Found | MalformedTaskError:
    try:
        return Found(read_task(folder, options), str(folder))
    except MalformedTaskError as error:
        return error


def _read(
    row: Fields | MalformedTaskError, reader: Callable[[Fields], Task]
) -> Found | MalformedTaskError:
    if isinstance(row, MalformedTaskError):
        return row
    try:
        return Found(reader(row), row.file, row.line)
    except MalformedTaskError as error:
        return error


def _read_unknown(row: Fields) -> Task:
    if swesmith.is_row(row.values):
        return swesmith.read_task(row)
    if not swebench.is_row(row.values):
        row.refuse("a row of SWE-bench or SWE-smith", kind_of(row.values))
    return swebench.read_task(row)
