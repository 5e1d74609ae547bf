"""The lines by which the programs inside a sandbox answer. Pure.

A letter, a blank, then base64 or JSON.
"""

import base64
import binascii
import json
from typing import Any

__all__ = ["LineReader", "Lines", "input_line"]

Lines = list[tuple[str, Any]]


class LineReader:
    """Cuts text, in pieces of any size, into lines.

    Data lines give bytes; the last line, `x`, gives what its JSON holds. Text that is no such line
    (a profile that prints something) is skipped.
    """

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str) -> Lines:
        """Takes the next text; returns the lines that are complete now."""
        *whole, self._rest = (self._rest + text).split("\n")
        return [parsed for line in whole if (parsed := _parsed(line)) is not None]


def input_line(data: bytes) -> str:
    """Input for a command, as a line to its supervisor."""
    return f"i {base64.b64encode(data).decode()}\n"


def _parsed(line: str) -> tuple[str, Any] | None:
    letter, blank, payload = line.partition(" ")
    if not blank or len(letter) != 1:
        return None
    try:
        if letter == "x":
            return letter, json.loads(payload)
        return letter, base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        return None
