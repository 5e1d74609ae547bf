"""Typed reading of a TOML table or a data set's row: errors name file, field, found, expected."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from swe_eval.errors import MalformedTaskError, UnsupportedTaskError


@dataclass(frozen=True, slots=True)
class Fields:
    """One table of a file, or a row of it, and where it stands."""

    task: str
    file: str
    values: Mapping[str, Any]
    prefix: str = ""
    line: int = 0
    """0 where the table is the whole file."""
    nulls: frozenset[str] = frozenset()
    """Columns that the row has and leaves empty; they are not in `values`."""

    def fail(self, key: str, expected: str, found: object) -> NoReturn:
        """Raises for a field with the wrong value."""
        raise MalformedTaskError(
            task=self.task,
            file=self.file,
            field=self.prefix + key,
            expected=expected,
            found=shown(found),
            line=self.line,
        )

    def unsupported(self, key: str, expected: str, found: object) -> NoReturn:
        """Raises for a field that is right and asks for what this version lacks."""
        raise UnsupportedTaskError(
            task=self.task,
            file=self.file,
            field=self.prefix + key,
            expected=expected,
            found=shown(found),
            line=self.line,
        )

    def table(self, key: str) -> "Fields":
        """A sub-table; empty when it is not there."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            self.fail(key, "a table", value)
        return Fields(self.task, self.file, value, f"{self.prefix}{key}.", self.line)

    def text(self, key: str, default: str = "") -> str:
        """A string."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            self.fail(key, "a string", value)
        return value

    def filled(self, key: str) -> str:
        """A string that says something."""
        value = self.text(key)
        if not value.strip():
            self.fail(key, "text", value)
        return value

    def demand(self, keys: Sequence[str], of_what: str) -> None:
        """Raises unless all keys are there; the error names each that is not."""
        missing = [self.prefix + key for key in keys if key not in self.values]
        if missing:
            self.refuse(of_what, "nothing", ", ".join(missing))

    def refuse(self, expected: str, found: str, field: str = "") -> NoReturn:
        """Raises for the row or table as a whole, or for a field, in the given words."""
        raise MalformedTaskError(
            task=self.task,
            file=self.file,
            line=self.line,
            field=field,
            expected=expected,
            found=found,
        )

    def choice(self, key: str, default: str, options: tuple[str, ...]) -> str:
        """One of several strings."""
        value = self.text(key, default)
        if value not in options:
            self.fail(key, "one of " + ", ".join(options), value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.fail(key, "true or false", value)
        return value

    def positive(self, key: str, default: float) -> float:
        """A finite number above 0; `default` itself may be 0 and mean unset."""
        value = self.values.get(key, default)
        if key not in self.values:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(key, "a number", value)
        if not math.isfinite(value) or value <= 0:
            self.fail(key, "a number above 0", value)
        return float(value)

    def text_table(self, key: str) -> dict[str, str]:
        """A table of strings, such as environment variables."""
        table = self.table(key)
        for name, value in table.values.items():
            if not isinstance(value, str):
                table.fail(name, "a string", value)
        return dict(table.values)

    def text_list(self, key: str) -> list[str]:
        """A list of strings; empty when it is not there."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.fail(key, "a list of strings", value)
        return list(value)


def shown(value: object) -> str:
    """The value in a message, cut to a line."""
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
