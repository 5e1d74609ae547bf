"""The report of an evaluation: an HTML file, a Markdown file, and their plots."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tailrace_cli.evaluation.result import EvaluationResult
from tailrace_cli.report.html import environment
from tailrace_cli.report.svg import COLOURS, as_svg, figure

SHOWN_STRATA = 30
"""The largest; the table has all."""


def pass_curve(result: EvaluationResult) -> str:
    """pass@k by k with its 95 % band."""
    plot, axes = figure()
    ks = [p.k for p in result.pass_at]
    axes.fill_between(
        ks,
        [p.ci95[0] for p in result.pass_at],
        [p.ci95[1] for p in result.pass_at],
        color=COLOURS[0],
        alpha=0.2,
        linewidth=0,
    )
    axes.plot(ks, [p.estimate for p in result.pass_at], marker="o", color=COLOURS[0])
    axes.set_xticks(ks)
    axes.set_ylim(0, 1)
    axes.set_xlabel("attempts k")
    axes.set_ylabel("pass@k, 95 % band")
    return as_svg(plot)


def pass_by_stratum(result: EvaluationResult) -> str:
    """pass@1 of each stratum with its 95 % interval, best first."""
    largest = sorted(result.strata, key=lambda s: -s.tasks)[:SHOWN_STRATA]
    shown = sorted(largest, key=lambda s: (s.pass_rate, s.name))
    plot, axes = figure(max(2.0, 0.6 + 0.24 * len(shown)))
    places = list(range(len(shown)))
    rates = [s.pass_rate for s in shown]
    # A rate may lie a rounding error outside its interval.
    low = [max(0.0, s.pass_rate - s.ci95[0]) for s in shown]
    high = [max(0.0, s.ci95[1] - s.pass_rate) for s in shown]
    axes.errorbar(rates, places, xerr=[low, high], fmt="o", color=COLOURS[0], capsize=3)
    axes.set_yticks(places, [f"{_plain(s.name)} ({s.tasks})" for s in shown], fontsize=8)
    axes.set_xlim(0, 1)
    axes.set_xlabel("pass@1, 95 % interval; tasks in brackets")
    return as_svg(plot)


def solved_by_task(result: EvaluationResult) -> str:
    """How many tasks were solved in how many of their attempts."""
    plot, axes = figure()
    counts = Counter(task.solved for task in result.by_task)
    most = max((task.attempts for task in result.by_task), default=result.attempts)
    axes.bar(range(most + 1), [counts[n] for n in range(most + 1)], color=COLOURS[2])
    axes.set_xlabel("attempts solved")
    axes.set_ylabel("tasks")
    return as_svg(plot)


def ends(result: EvaluationResult) -> str:
    """Attempts by outcome, and faulted tries by stage and cause."""
    counted = {name: n for name, n in result.outcomes.items() if name != "FAULT"}
    rows = [*counted.items(), *result.faults.items()]
    plot, axes = figure(max(1.6, 0.6 + 0.26 * len(rows)))
    colours = [COLOURS[0]] * len(counted) + [COLOURS[4]] * len(result.faults)
    axes.barh([name for name, _ in rows], [n for _, n in rows], color=colours)
    axes.invert_yaxis()
    axes.set_xlabel("attempts that count (blue), tries that faulted and do not (red)")
    return as_svg(plot)


PLOTS = {
    "pass-at-k": ("pass@k", pass_curve),
    "strata": ("pass@1 by stratum", pass_by_stratum),
    "tasks": ("Tasks by attempts solved", solved_by_task),
    "outcomes": ("Outcomes and faults", ends),
}


def write_evaluation_report(folder: Path, result: EvaluationResult) -> None:
    """Writes `report.html`, self-contained, and `report.md` with its plots under `plots/`."""
    drawn = [(name, title, draw(result)) for name, (title, draw) in PLOTS.items()]
    (folder / "plots").mkdir(exist_ok=True)
    for name, _, svg in drawn:
        (folder / "plots" / f"{name}.svg").write_text(svg)
    for form in ("html", "md"):
        template = environment(escape=form == "html").get_template(f"evaluation.{form}.j2")
        text = template.render(result=result, plots=drawn, shown_strata=SHOWN_STRATA)
        (folder / f"report.{form}").write_text(text)


def _plain(name: str) -> str:
    # Matplotlib reads $...$ as mathematics.
    return name.replace("$", r"\$")
