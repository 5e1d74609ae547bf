"""`tailrace tasks validate`: what can be used of task directories and data sets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from service_kit.config import ConfigError
from swe_eval import MalformedTaskError, TaskSetError
from swe_eval.tasks.validate import tell_problems, validate


def validate_tasks(paths: Sequence[Path], *, as_json: bool) -> bool:
    """Prints each task that can't be used; whether there was none.

    Raises:
        ConfigError: a path holds no tasks at all.
    """
    try:
        return _print_json(paths) if as_json else tell_problems(paths, print)
    except TaskSetError as error:
        raise ConfigError(str(error)) from error


def _print_json(paths: Sequence[Path]) -> bool:
    good: list[str] = []
    problems: list[dict[str, str | int]] = []
    for found in validate(paths):
        if isinstance(found, MalformedTaskError):
            problems.append(as_row(found))
        else:
            good.append(found.task.task_id)
    print(json.dumps({"tasks": good, "problems": problems}))
    return not problems


def as_row(problem: MalformedTaskError) -> dict[str, str | int]:
    """For `--json`."""
    return {
        "error": type(problem).__name__.removesuffix("Error"),
        "task": problem.task,
        "file": problem.file,
        "line": problem.line,
        "field": problem.field,
        "expected": problem.expected,
        "found": problem.found,
    }
