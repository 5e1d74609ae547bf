"""What a check returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    """It works, with less protection or less speed."""
    PROBLEM = "problem"
    """Something will not work."""


@dataclass(frozen=True)
class Finding:
    """One thing about this host. A finding that is not ok says how to mend it."""

    check: str
    status: Status
    found: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.status is not Status.OK and not self.fix:
            raise ValueError(f"finding {self.check!r} is {self.status} and must say how to mend it")


Check = Callable[[], list[Finding]]
