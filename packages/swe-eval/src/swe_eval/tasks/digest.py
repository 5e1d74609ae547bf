"""The identity of what a task's grading depends on, so that a changed task is told from the old."""

import hashlib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from typing import Any

from swe_eval.tasks.task import Task


def task_digest(task: Task) -> str:
    """SHA-256, in hexadecimal, over environment, tests, limits and reference.

    The instruction is not part of it: no test reads it.
    """
    found = hashlib.sha256()
    for part in _parts((task.task_id, task.environment, task.grader, task.reference)):
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.hexdigest()


def _parts(value: Any) -> list[bytes]:
    """The value as a list of byte strings that no other value has; the order of keys is none."""
    if is_dataclass(value) and not isinstance(value, type):
        inner = {field.name: getattr(value, field.name) for field in fields(value)}
        return [type(value).__name__.encode(), *_parts(inner)]
    if isinstance(value, Mapping):
        items = [part for key in sorted(value) for part in _parts((key, value[key]))]
        return [b"mapping %d" % len(value), *items]
    if isinstance(value, tuple | list | AbstractSet):
        ordered = sorted(value) if isinstance(value, AbstractSet) else value
        return [b"list %d" % len(value), *(part for item in ordered for part in _parts(item))]
    if isinstance(value, bytes):
        return [b"bytes", value]
    return [type(value).__name__.encode(), str(value).encode("utf-8", "surrogateescape")]
