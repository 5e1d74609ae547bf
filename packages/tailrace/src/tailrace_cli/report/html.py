"""Puts a run's record into one HTML file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from tailrace_cli.demo.folder import read_events
from tailrace_cli.demo.options import DemoOptions
from tailrace_cli.demo.record import (
    STAGES,
    RunRecord,
    fold,
    kinds_improved,
    outcomes,
    result,
    time_share,
)
from tailrace_cli.report import plots

PLOTS = (
    ("pass@1 by stage, with 95 % intervals", plots.pass_by_stage),
    ("Kinds of bugs", plots.pass_by_kind),
    ("Reward", plots.reward),
    ("Staleness of trained attempts", plots.staleness),
    ("Staleness by step", plots.staleness_by_step),
    ("Length of trajectories", plots.lengths),
    ("The tail of a batch", plots.tail),
    ("Where the time went", plots.time_split),
    ("Outcomes", plots.outcomes_by_step),
)


def causes(record: RunRecord) -> list[tuple[str, int]]:
    """Limits, faults and refused groups by cause, most frequent first."""
    total: Counter[str] = Counter()
    for step in record.rl_steps:
        for name, count in step.counts.items():
            if name.startswith(("limit.", "fault.", "decision.")) and count:
                total[name] += count
    return total.most_common()


def gain(record: RunRecord) -> str:
    """What this run says about learning, and no more than it says."""
    before, after = (record.evaluations.get(name) for name in ("sft", "rl"))
    if before is None or after is None:
        return "It says nothing about reinforcement learning: not all stages have been scored."
    change = f"pass@1 went from {before.pass1:.3f} after SFT to {after.pass1:.3f}"
    where = "on tasks whose repositories, function names and bugs occur nowhere in training"
    if after.ci95[0] > before.ci95[1]:
        return f"It shows that the policy improves {where}: {change}, with intervals apart."
    if before.ci95[0] > after.ci95[1]:
        return f"It shows that the policy got worse {where}: {change}, with intervals apart."
    return (
        f"It does not show that the policy improves {where}: {change}, but the intervals overlap."
    )


def environment(*, escape: bool = True) -> Environment:
    """Where the pages' templates are; `| cell` makes any text fit a cell of a Markdown table."""
    made = Environment(
        loader=PackageLoader("tailrace_cli", "report"),
        autoescape=escape,  # noqa: S701 -- off for Markdown alone
        undefined=StrictUndefined,
    )
    made.filters["cell"] = lambda text: " ".join(str(text).replace("|", r"\|").split())
    return made


def render(record: RunRecord, options: DemoOptions) -> str:
    """The page as text."""
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            record=record,
            options=options,
            stages=[
                (name, record.evaluations[name]) for name in STAGES if name in record.evaluations
            ],
            plots=[(title, draw(record)) for title, draw in PLOTS],
            outcomes=outcomes(record),
            causes=causes(record),
            shares=time_share(record),
            result=result(record),
            gain=gain(record),
            improved=kinds_improved(record),
        )
    )


def write_report(folder: Path) -> Path:
    """Writes `report.html` of the run in `folder`, from its events alone, and returns its path.

    Raises:
        FolderError: `folder` holds no run.
    """
    record = fold(read_events(folder))
    options = DemoOptions.model_validate_json((folder / "options.json").read_text())
    page = folder / "report.html"
    page.write_text(render(record, options))
    return page
