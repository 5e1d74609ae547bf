"""A stage's events: kept in a file, read by watchers from any cursor on."""

from __future__ import annotations

import asyncio
import enum
import errno
import json
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_trainer.errors import DiskFull


class EventKind(enum.StrEnum):
    """What happened."""

    STEP = "step"
    VERSION = "version"
    CHECKPOINT = "checkpoint"
    ENDED = "ended"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes:
        cursor: Its place, from 1.
        kind: What happened.
        data: More about it, JSON values.
    """

    cursor: int
    kind: EventKind
    data: Mapping[str, Any]


class EventLog:
    """Appends events to a file of JSON lines, and tells watchers.

    A line that a kill cut off is dropped when the file is opened again.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._events: list[Event] = []
        self._changed = asyncio.Condition()
        if file.is_file():
            self._read()

    @property
    def events(self) -> tuple[Event, ...]:
        """All events so far."""
        return tuple(self._events)

    async def append(self, kind: EventKind, data: Mapping[str, Any]) -> Event:
        """Write an event and wake the watchers, who see it even if it could not be written.

        Raises:
            DiskFull: There is no space for it.
        """
        event = Event(len(self._events) + 1, kind, finite(data))
        self._events.append(event)
        async with self._changed:
            self._changed.notify_all()
        line = json.dumps({"kind": kind.value, **event.data}, allow_nan=False)
        try:
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(f"{self._file}: no space for another line") from error
            raise
        return event

    async def follow(self, cursor: int) -> AsyncIterator[Event]:
        """Yield every event after a cursor, and go on with those to come, without end."""
        while True:
            for event in self._events[cursor:]:
                yield event
                cursor = event.cursor
            async with self._changed:
                while len(self._events) <= cursor:
                    await self._changed.wait()

    def _read(self) -> None:
        data = self._file.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self._file.write_bytes(whole)
        for number, line in enumerate(whole.splitlines(), start=1):
            fields = json.loads(line)
            kind = EventKind(fields.pop("kind"))
            self._events.append(Event(number, kind, fields))


def finite(data: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out numbers that JSON has no form for; a count elsewhere says that they occurred."""
    out: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, Mapping):
            out[name] = finite(value)
        elif not isinstance(value, float) or math.isfinite(value):
            out[name] = value
    return out
