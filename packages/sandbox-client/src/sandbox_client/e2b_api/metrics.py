"""What a sandbox uses, seen by a program in it: back-ends have no call for that. Pure."""

from dataclasses import dataclass

__all__ = ["USAGE_SCRIPT", "Usage", "parse_usage"]

_STATS = "cat /proc/uptime; cat /proc/[0-9]*/stat 2>/dev/null"
USAGE_SCRIPT = (
    'stat -f -c "%S %b %f" -- "$1"; echo; cat /proc/[0-9]*/statm 2>/dev/null; '
    f"echo; {_STATS}; echo; sleep 0.1; {_STATS}"
)
"""For `/bin/sh -c SCRIPT sh FOLDER`: the folder's file system, memory, and processor time twice."""

_PAGE_BYTES = 4096
_TICKS_A_SECOND = 100


@dataclass(frozen=True)
class Usage:
    """One look at a sandbox."""

    disk_bytes: int
    memory_bytes: int
    """Resident memory of all processes; what they share counts for each."""
    cpus: float
    """Cores busy during the look."""


def parse_usage(output: str) -> Usage:
    """What the script has printed.

    Raises:
        ValueError: it printed something else.
    """
    try:
        disk, memory, before, after = output.split("\n\n")
        block, total, free = map(int, disk.split())
        pages = sum(int(line.split()[1]) for line in memory.splitlines())
        began, spent_before = _processor_time(before)
        ended, spent_after = _processor_time(after)
    except (ValueError, IndexError) as error:
        raise ValueError(f"the usage cannot be read: {error}") from None
    busy = max(0.0, spent_after - spent_before) / max(ended - began, 1e-3)
    return Usage((total - free) * block, pages * _PAGE_BYTES, busy)


def _processor_time(text: str) -> tuple[float, float]:
    """When the look was taken, and the seconds that all processes have spent."""
    first, *lines = text.splitlines()
    # A program's name may hold anything but is always in brackets.
    fields = (line.rpartition(") ")[2].split() for line in lines)
    ticks = sum(int(words[11]) + int(words[12]) for words in fields if len(words) > 12)
    return float(first.split()[0]), ticks / _TICKS_A_SECOND
