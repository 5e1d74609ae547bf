"""Two runs on the same tasks: who is better, by how much, and could it be chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from swe_eval import (
    Interval,
    PairedComparison,
    TaskScore,
    compare_paired,
    mean_pass_at_k,
    pass_at_1_interval,
)

from tailrace_cli.demo.folder import FolderError
from tailrace_cli.evaluation.result import EvaluationResult


@dataclass(frozen=True, kw_only=True)
class Side:
    """One run on the shared tasks."""

    name: str
    claim: str
    pass_at_1: float
    ci95: Interval


@dataclass(frozen=True, kw_only=True)
class StratumComparison:
    """The shared tasks of one stratum."""

    name: str
    paired: PairedComparison


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """B against A."""

    a: Side
    b: Side
    paired: PairedComparison
    strata: tuple[StratumComparison, ...]
    warnings: tuple[str, ...]
    """What makes the runs unlike each other besides the policy."""

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def compare(a: EvaluationResult, b: EvaluationResult) -> Comparison:
    """Compares two results on the tasks that both scored.

    Raises:
        FolderError: they share no scored task.
    """
    shared = {s.task_id for s in a.scores} & {s.task_id for s in b.scores}
    if not shared:
        raise FolderError(
            f"the runs share no scored task: A has {a.tasks} of list {a.task_list_digest}, B "
            f"{b.tasks} of {b.task_list_digest}; evaluate B with --list of A's tasks.json"
        )
    of_a, of_b = _on(a, shared), _on(b, shared)
    stratum_of = {task.task_id: task.stratum for task in a.by_task}
    strata = []
    for name in sorted({stratum_of[task_id] for task_id in shared}):
        members = {task_id for task_id in shared if stratum_of[task_id] == name}
        strata.append(
            StratumComparison(name=name, paired=compare_paired(_on(a, members), _on(b, members)))
        )
    return Comparison(
        a=_side(a, of_a),
        b=_side(b, of_b),
        paired=compare_paired(of_a, of_b),
        strata=tuple(strata),
        warnings=tuple(_warnings(a, b, len(shared))),
    )


def _on(result: EvaluationResult, task_ids: set[str]) -> list[TaskScore]:
    return [score for score in result.scores if score.task_id in task_ids]


def _side(result: EvaluationResult, scores: Sequence[TaskScore]) -> Side:
    return Side(
        name=result.name,
        claim=result.claim,
        pass_at_1=mean_pass_at_k(scores, 1),
        ci95=pass_at_1_interval(scores),
    )


def _warnings(a: EvaluationResult, b: EvaluationResult, shared: int) -> list[str]:
    found = []
    if a.task_list_digest != b.task_list_digest:
        found.append(
            f"the lists of tasks differ: {shared} are shared and scored, of {a.listed} and "
            f"{b.listed}"
        )
    elif shared < a.listed:
        found.append(f"{shared} of {a.listed} tasks are scored in both; the rest kept faulting")
    found += [
        f"{name} is {mine} in A and {theirs} in B"
        for name in ("temperature", "top_p", "attempts")
        if (mine := getattr(a, name)) != (theirs := getattr(b, name))
    ]
    found += [f"{side}: {r.claim}" for side, r in (("A", a), ("B", b)) if not r.pinned_version]
    return found


def show_comparison(found: Comparison, console: Console) -> None:
    """Two tables and what to bear in mind."""
    table = Table("", "run", "pass@1", "95 % interval", box=None)
    for letter, side in (("A", found.a), ("B", found.b)):
        table.add_row(letter, Text(side.name), f"{side.pass_at_1:.3f}", span(side.ci95))
    table.add_row("B - A", "", f"{found.paired.difference:+.3f}", span(found.paired.interval, "+"))
    console.print(table)
    console.print(
        f"p = {found.paired.p_value:.3g}, two-sided, sign flips over {found.paired.tasks} tasks"
    )
    if len(found.strata) > 1:
        strata = Table("stratum", "tasks", "B - A", "p (not corrected)", box=None)
        for stratum in found.strata:
            paired = stratum.paired
            strata.add_row(
                Text(stratum.name),
                str(paired.tasks),
                f"{paired.difference:+.3f}",
                f"{paired.p_value:.3g}",
            )
        console.print(strata)
    for warning in found.warnings:
        console.print(Text(f"note: {warning}"), soft_wrap=True)


def span(interval: Interval, sign: str = "") -> str:
    """An interval in words."""
    return f"{interval.low:{sign}.3f} to {interval.high:{sign}.3f}"
