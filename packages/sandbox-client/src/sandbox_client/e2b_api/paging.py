"""Cursors over a sorted list. Pure.

A cursor names the last item handed out, so what is added or removed meanwhile neither repeats nor
hides others.
"""

import base64
import binascii
import json
from collections.abc import Sequence
from typing import TypeVar

__all__ = ["BadCursorError", "page"]

T = TypeVar("T")
Key = tuple[float, str]


class BadCursorError(ValueError):
    """The text is no cursor that was handed out here."""


def page(
    items: Sequence[tuple[Key, T]], *, limit: int, cursor: str = "", descending: bool = False
) -> tuple[list[T], str]:
    """The next items by their keys, at most `limit`, and the cursor for those after.

    The cursor is empty at the end.

    Raises:
        BadCursorError: `cursor` was not made here.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    ordered = sorted(items, key=lambda item: item[0], reverse=descending)
    if cursor:
        last = _decode(cursor)
        ordered = [item for item in ordered if (item[0] < last if descending else item[0] > last)]
    shown = ordered[:limit]
    following = _encode(shown[-1][0]) if len(ordered) > limit else ""
    return [item for _, item in shown], following


def _encode(key: Key) -> str:
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode()


def _decode(cursor: str) -> Key:
    try:
        at, name = json.loads(base64.urlsafe_b64decode(cursor.encode()))
        return float(at), str(name)
    except (binascii.Error, ValueError, TypeError) as error:
        raise BadCursorError(f"not a cursor of this endpoint: {cursor[:80]!r}") from error
