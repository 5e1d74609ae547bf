"""Checks of this host, one module each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tailrace_cli.doctor import compute, disk, memory, ports, sandbox, ulimits, weights
from tailrace_cli.doctor.base import Finding, Status
from tailrace_cli.stack.spec import StackSpec

__all__ = ["Finding", "Status", "as_dict", "examine", "passed", "show"]

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
        *sandbox.check(stack),
        *weights.check(stack),
        *ports.check(stack),
    ]


def passed(findings: Sequence[Finding]) -> bool:
    """True when nothing stands in the way; warnings do not."""
    return all(f.status is not Status.PROBLEM for f in findings)


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """For `--json`."""
    return {"passed": passed(findings), "findings": [asdict(f) for f in findings]}


def show(findings: Sequence[Finding], console: Console) -> None:
    """One line a finding, and beside it how to mend what is not ok."""
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        table.add_row(MARKS[finding.status], Text(finding.check), Text(finding.found))
        if finding.fix:
            table.add_row("", "", Text(f"-> {finding.fix}", style="bold"))
    console.print(table)
    problems = sum(f.status is Status.PROBLEM for f in findings)
    console.print(f"{problems} problem(s)" if problems else "nothing stands in the way")
