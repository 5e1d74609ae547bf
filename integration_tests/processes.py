"""Processes of this host, told apart even when a number is used again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path


def parents() -> dict[int, int]:
    """Parent of every process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found[int(entry.name)] = int(_stat(int(entry.name))[1])
    return found


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def status_of(pid: int) -> str:
    """A process's state as the kernel has it: `R`, `S`, `T` when stopped, `Z`, ..."""
    return _stat(pid)[0]


def identity(pid: int) -> tuple[int, str] | None:
    """A process for good: its number and when it started; None if there is none."""
    try:
        return pid, _stat(pid)[19]
    except OSError:
        return None


def descendants(pid: int) -> set[tuple[int, str]]:
    """Every process below one, by identity."""
    children: dict[int, list[int]] = {}
    for child, parent in parents().items():
        children.setdefault(parent, []).append(child)
    found: set[tuple[int, str]] = set()
    left = list(children.get(pid, []))
    while left:
        member = left.pop()
        left += children.get(member, [])
        known = identity(member)
        if known is not None:
            found.add(known)
    return found


def alive(processes: Iterable[tuple[int, str]]) -> set[tuple[int, str]]:
    """Those that are still there, zombies included."""
    return {process for process in processes if identity(process[0]) == process}
