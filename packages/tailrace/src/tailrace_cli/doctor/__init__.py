"""Checks of this host, one module each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from tailrace_cli.doctor import compute, disk, memory, ports, sandbox, ulimits
from tailrace_cli.doctor.base import Finding, Status
from tailrace_cli.stack.spec import StackSpec

__all__ = ["Finding", "Status", "examine", "show"]

MARKS = {
    Status.OK: "[green]ok[/]",
    Status.WARNING: "[yellow]warning[/]",
    Status.PROBLEM: "[red]problem[/]",
}


def examine(stack: StackSpec) -> list[Finding]:
    """All findings, in the order in which a newcomer would mend them."""
    return [
        *compute.check(),
        *memory.check(),
        *disk.check(),
        *ulimits.check(),
        *sandbox.check(),
        *ports.check(stack),
    ]


def show(findings: Sequence[Finding], console: Console) -> None:
    """One line a finding, and below it how to mend what is not ok."""
    for finding in findings:
        console.print(
            f"{MARKS[finding.status]:>8}  {finding.check}: {finding.found}", highlight=False
        )
        if finding.fix:
            console.print(f"          -> {finding.fix}", highlight=False)
    bad = sum(f.status is Status.PROBLEM for f in findings)
    console.print("nothing stands in the way" if not bad else f"{bad} problem(s)")
