"""A run's folder: never overwritten, resumable, and complete enough to rebuild the report from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tailrace_cli.demo.options import DemoOptions

OPTIONS = "options.json"
EVENTS = "events.jsonl"
Event = dict[str, Any]


class FolderError(Exception):
    """The folder cannot be used as asked. Bad input: exit code 2."""


class RunFolder:
    """Owns `options.json` and `events.jsonl` of a run; services keep their state beside them."""

    def __init__(self, path: Path, options: DemoOptions, clock: Callable[[], float]) -> None:
        self.path = path
        self.options = options
        self._clock = clock
        self._events = (path / EVENTS).open("a", buffering=1)

    @classmethod
    def create(cls, path: Path, options: DemoOptions, clock: Callable[[], float]) -> RunFolder:
        """A new run's folder.

        Raises:
            FolderError: `path` exists and is not empty.
        """
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise FolderError(
                f"{path} exists and is not empty; choose another --out, "
                f"or go on with --resume {path}"
            )
        path.mkdir(parents=True, exist_ok=True)
        (path / OPTIONS).write_text(options.model_dump_json(indent=2))
        return cls(path, options, clock)

    @classmethod
    def resume(cls, path: Path, clock: Callable[[], float]) -> RunFolder:
        """The folder of a run that goes on with the options it was started with.

        Raises:
            FolderError: there is no such run, or its options are damaged.
        """
        try:
            options = DemoOptions.model_validate_json((path / OPTIONS).read_text())
        except FileNotFoundError as error:
            raise FolderError(f"{path} holds no demo run ({OPTIONS} is missing)") from error
        except ValidationError as error:
            raise FolderError(f"{path / OPTIONS} is damaged: {error.errors()[0]['msg']}") from error
        return cls(path, options, clock)

    def record(self, kind: str, **fields: Any) -> Event:
        """Appends an event and returns it with its time (Unix seconds)."""
        event = {"time_s": round(self._clock(), 3), "kind": kind, **fields}
        self._events.write(json.dumps(event) + "\n")
        return event

    def close(self) -> None:
        """Syncs the event log."""
        self._events.flush()
        os.fsync(self._events.fileno())
        self._events.close()


def read_events(path: Path) -> Iterator[Event]:
    """The events of a run in order; a torn last line (the run was killed) is left out.

    Raises:
        FolderError: there is no such run.
    """
    try:
        lines = (path / EVENTS).read_text().splitlines()
    except FileNotFoundError as error:
        raise FolderError(f"{path} holds no demo run ({EVENTS} is missing)") from error
    for number, line in enumerate(lines):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) - 1:
                return
            raise FolderError(f"{path / EVENTS}, line {number + 1} is damaged: {error}") from error


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a small document atomically."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=2))
    temporary.replace(path)
