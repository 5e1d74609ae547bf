# ruff: noqa: PTH123, PTH208 -- keeps the fork-server small: no pathlib
"""Who is whose in a sandbox's pid namespace, as /proc tells it."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Process", "in_killing_order", "processes", "tree_of"]


@dataclass(frozen=True)
class Process:
    """One process. `started` tells a reused pid from the earlier one."""

    pid: int
    parent: int
    session: int
    started: int


def processes() -> list[Process]:
    """All processes of this pid namespace except the first and those that have ended."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue  # it ended meanwhile
        # The name in parentheses may contain anything, so what follows the last one counts.
        fields = stat[stat.rindex(b")") + 2 :].split()
        if fields[0] not in (b"Z", b"X"):
            found.append(Process(int(name), int(fields[1]), int(fields[3]), int(fields[19])))
    return found


def tree_of(roots: Iterable[int], everyone: Iterable[Process]) -> set[int]:
    """Pids that descend from `roots` or live in a session that one of them leads."""
    everyone = list(everyone)
    inside = set(roots)
    sessions = set(inside)
    grew = True
    while grew:
        grew = False
        for process in everyone:
            if process.pid not in inside and (
                process.parent in inside or process.session in sessions
            ):
                inside.add(process.pid)
                grew = True
    return inside


def in_killing_order(victims: Iterable[tuple[int, int]], root: int) -> list[tuple[int, int]]:
    """The command's own process before its children, `(pid, started)` each.

    A shell that sees its child die first ends by itself, as if nobody had killed it.
    """
    return sorted(victims, key=lambda victim: victim[0] != root)
