"""Plots of a run."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace_cli.demo.record import (
    STAGES,
    TIME_SHARES,
    RunRecord,
    Step,
    staleness_histogram,
)
from tailrace_cli.report.svg import ABOVE, COLOURS, as_svg, figure


def _series(steps: Sequence[Step], name: str) -> tuple[list[int], list[float]]:
    found = [(s.step, s.values[name]) for s in steps if name in s.values]
    return [x for x, _ in found], [y for _, y in found]


def pass_by_stage(record: RunRecord) -> str:
    """pass@1 of base, SFT and RL with 95 % intervals."""
    plot, axes = figure()
    names = [name for name in STAGES if name in record.evaluations]
    scores = [record.evaluations[name] for name in names]
    axes.bar(names, [s.pass1 for s in scores], color=COLOURS[: len(names)], width=0.55)
    low = [s.pass1 - s.ci95[0] for s in scores]
    high = [s.ci95[1] - s.pass1 for s in scores]
    axes.errorbar(
        names,
        [s.pass1 for s in scores],
        yerr=[low, high],
        fmt="none",
        ecolor="black",
        capsize=6,
    )
    for name, s in zip(names, scores, strict=True):
        axes.annotate(f"{s.pass1:.3f}", (name, s.ci95[1]), ha="center", va="bottom", fontsize=9)
    axes.set_ylim(0, max(0.1, *(s.ci95[1] * 1.15 for s in scores)) if scores else 1)
    axes.set_ylabel("pass@1, held-out tasks")
    return as_svg(plot)


def pass_by_kind(record: RunRecord) -> str:
    """Pass rate by kind of bug, SFT against RL."""
    plot, axes = figure()
    shown = [name for name in ("sft", "rl") if name in record.evaluations]
    kinds = sorted({k.name for name in shown for k in record.evaluations[name].by_kind})
    for i, name in enumerate(shown):
        rates = {k.name: k.pass_rate for k in record.evaluations[name].by_kind}
        positions = [k + (i - 0.5) * 0.38 for k in range(len(kinds))]
        axes.barh(
            positions, [rates.get(k, 0.0) for k in kinds], 0.36, label=name, color=COLOURS[i + 1]
        )
    axes.set_yticks(range(len(kinds)), kinds, fontsize=8)
    axes.set_xlabel("share of attempts solved")
    if shown:
        axes.legend(frameon=False)
    return as_svg(plot)


def reward(record: RunRecord) -> str:
    """Mean reward of the trained groups by optimizer step."""
    plot, axes = figure()
    x, y = _series(record.rl_steps, "reward.mean")
    axes.plot(x, y, color=COLOURS[0], alpha=0.35)
    if len(y) >= 5:
        smooth = [
            sum(y[max(0, i - 4) : i + 1]) / len(y[max(0, i - 4) : i + 1]) for i in range(len(y))
        ]
        axes.plot(x, smooth, color=COLOURS[0], label="mean of 5 steps")
        axes.legend(frameon=False)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean reward")
    axes.set_ylim(bottom=0)
    return as_svg(plot)


def staleness(record: RunRecord) -> str:
    """Histogram of staleness over trained attempts."""
    plot, axes = figure()
    histogram = staleness_histogram(record)
    axes.bar([str(k) for k in histogram], list(histogram.values()), color=COLOURS[3])
    axes.set_xlabel(
        f"optimizer steps between sampling and training (bound {record.staleness_bound})"
    )
    axes.set_ylabel("attempts")
    return as_svg(plot)


def staleness_by_step(record: RunRecord) -> str:
    """Mean and maximum staleness by optimizer step."""
    plot, axes = figure()
    for i, name in enumerate(("staleness.mean", "staleness.max")):
        x, y = _series(record.rl_steps, name)
        axes.plot(x, y, label=name.removeprefix("staleness."), color=COLOURS[3 - i])
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("staleness, optimizer steps")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return as_svg(plot)


def lengths(record: RunRecord) -> str:
    """Tokens a trajectory: median, 90th percentile and maximum by step."""
    plot, axes = figure()
    for i, name in enumerate(("tokens.p50", "tokens.p90", "tokens.max")):
        x, y = _series(record.rl_steps, name)
        axes.plot(x, y, label=name.removeprefix("tokens."), color=COLOURS[i])
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("tokens a trajectory")
    axes.legend(frameon=False)
    return as_svg(plot)


def tail(record: RunRecord) -> str:
    """Share of the slowest trajectory's time that went by after 90 % had finished."""
    plot, axes = figure()
    x, y = _series(record.rl_steps, "duration.tail_ratio")
    axes.plot(x, y, color=COLOURS[4])
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("share of the slowest one's time\nafter 90 % had finished")
    axes.set_ylim(0, 1)
    return as_svg(plot)


def time_split(record: RunRecord) -> str:
    """Where each step's time went."""
    plot, axes = figure()
    steps = [s.step for s in record.rl_steps]
    series = [
        [s.values.get(f"time.{name}_s", 0.0) for s in record.rl_steps] for name in TIME_SHARES
    ]
    if steps:
        axes.stackplot(steps, series, labels=TIME_SHARES, colors=COLOURS)
        axes.legend(**ABOVE)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("seconds")
    return as_svg(plot)


def outcomes_by_step(record: RunRecord) -> str:
    """Attempts of each step by outcome and, for limits and faults, by cause."""
    plot, axes = figure()
    names = sorted({n for s in record.rl_steps for n in s.counts if n.startswith("outcome.")})
    bottom = [0] * len(record.rl_steps)
    steps = [s.step for s in record.rl_steps]
    for i, name in enumerate(names):
        counts = [s.counts.get(name, 0) for s in record.rl_steps]
        axes.bar(
            steps,
            counts,
            bottom=bottom,
            width=1.0,
            label=name.removeprefix("outcome."),
            color=COLOURS[i % len(COLOURS)],
        )
        bottom = [b + c for b, c in zip(bottom, counts, strict=True)]
    if names:
        axes.legend(**ABOVE)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("attempts")
    return as_svg(plot)
