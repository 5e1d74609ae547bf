"""What the doctor finds."""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Level"]


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    """Sandboxes run, with less protection, fewer at once, or slower."""
    PROBLEM = "problem"
    """Sandboxes cannot run."""


@dataclass(frozen=True)
class Finding:
    """One thing about this host; what is not ok comes with what to do about it."""

    check: str
    level: Level
    found: str
    fix: str = ""
