"""The terminal view of a run: a live panel on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tailrace_cli.demo.record import (
    STAGES,
    TIME_SHARES,
    RunRecord,
    Step,
    staleness_histogram,
    time_share,
)

BLOCKS = "▁▂▃▄▅▆▇█"
LINE_EVERY_S = 5.0
BAR_WIDTH = 40


def sparkline(values: Sequence[float], width: int = 40, top: float | None = None) -> str:
    """Bars of the last `width` values, scaled from 0 to `top` (default: their maximum)."""
    shown = values[-width:]
    highest = top if top is not None else max(shown, default=0.0)
    if highest <= 0:
        return BLOCKS[0] * len(shown)
    last = len(BLOCKS) - 1
    return "".join(BLOCKS[min(last, int(max(v, 0.0) / highest * last + 0.5))] for v in shown)


def score(record: RunRecord, stage: str) -> str:
    """A stage's pass@1 with its interval, its progress, or a dash."""
    if stage in record.evaluations:
        e = record.evaluations[stage]
        return f"{e.pass1:.3f}  [{e.ci95[0]:.3f}, {e.ci95[1]:.3f}]"
    if stage in record.progress and record.progress[stage].done:
        p = record.progress[stage]
        return f"{p.solved / p.done:.3f}  ({p.done} of {p.total} attempts)"
    return "-"


def reward_series(record: RunRecord) -> list[float]:
    """Mean rewards by step; a step before which no group came in has none."""
    found = (step.values.get("reward.mean") for step in record.rl_steps)
    return [reward for reward in found if reward is not None]


def line(record: RunRecord) -> str:
    """The state of a run in one line."""
    parts = [f"{record.wall_s:5.0f} s", record.stage]
    if record.traces[0] < record.traces[1]:
        parts.append(f"{record.traces[0]}/{record.traces[1]}")
    if record.stage == "sft" and record.sft_steps:
        last = record.sft_steps[-1]
        parts.append(f"step {last.step}/{record.steps_total.get('sft', 0)}")
        parts.append(f"loss {last.values.get('loss', float('nan')):.3f}")
    if record.stage == "rl" and record.rl_steps:
        last = record.rl_steps[-1]
        parts.append(f"step {last.step}/{record.steps_total.get('rl', 0)}")
        rewards = reward_series(record)
        if rewards:
            parts.append(f"reward {rewards[-1]:.3f}")
        parts.append(f"staleness {last.values.get('staleness.mean', 0.0):.1f}")
    if record.stage == "rl" and any(record.groups):
        parts.append(f"groups: {record.groups[0]} in flight, {record.groups[1]} ready")
    running = [
        name for name in STAGES if name in record.progress and name not in record.evaluations
    ]
    parts += [f"pass@1 of {name}: {score(record, name)}" for name in running]
    return "  ".join(parts)


def panel(record: RunRecord) -> RenderableType:
    """The live panel."""
    stages = Table.grid(padding=(0, 2))
    for name in STAGES:
        stages.add_row(Text(name, style="bold"), Text(score(record, name)))
    rows = Table.grid(padding=(0, 2))
    rows.add_row(Text("stage", style="bold"), f"{record.stage}, {clock_time(record.wall_s)}")
    rows.add_row(Text("pass@1", style="bold"), stages)
    if record.traces[0] < record.traces[1]:
        rows.add_row("traces", _bar(*record.traces, "by the scripted expert"))
    for name, steps in (("sft", record.sft_steps), ("rl", record.rl_steps)):
        total = record.steps_total.get(name, 0)
        if steps and total:
            rows.add_row(f"{name} steps", _bar(steps[-1].step, total, _figures(name, steps[-1])))
    if any(record.groups) and record.stage == "rl":
        rows.add_row("in flight", _in_flight(record))
    if record.rl_steps:
        _add_learning(rows, record)
    return Group(
        Text(f"tailrace demo, seed {record.seed}", style="bold cyan"),
        rows,
        *(Text(note, style="yellow") for note in record.notes[-3:]),
    )


def clock_time(seconds: float) -> str:
    """Minutes and seconds."""
    minutes, left = divmod(int(seconds), 60)
    return f"{minutes}:{left:02d} min"


def _bar(done: int, total: int, more: str) -> RenderableType:
    row = Table.grid(padding=(0, 2))
    row.add_row(ProgressBar(total=total, completed=done, width=BAR_WIDTH), f"{done}/{total}", more)
    return row


def _figures(stage: str, step: Step) -> str:
    if stage == "sft":
        return f"loss {step.values.get('loss', float('nan')):.3f}"
    return ""


def _in_flight(record: RunRecord) -> str:
    groups, ready = record.groups
    text = f"{groups} groups, {ready} more ready to be trained"
    if record.rl_steps:
        attempts = record.rl_steps[-1].values.get("attempts_in_flight", 0)
        text = f"{attempts:.0f} trajectories in {text}"
    return text


def _add_learning(rows: Table, record: RunRecord) -> None:
    rewards = reward_series(record)
    shares = time_share(record)
    histogram = staleness_histogram(record)
    if rewards:
        rows.add_row("reward", f"{sparkline(rewards, top=1.0)} {rewards[-1]:.3f}")
    rows.add_row(
        "staleness",
        ", ".join(f"{k}: {n}" for k, n in histogram.items())
        + f" trajectories (bound {record.staleness_bound})",
    )
    rows.add_row(
        "time", ", ".join(f"{name.replace('_', ' ')} {shares[name]:.0%}" for name in TIME_SHARES)
    )


class LiveView:
    """Shows a record as it changes; use as a context manager."""

    def __init__(
        self,
        record: RunRecord,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._record = record
        self._console = console
        self._clock = clock
        self._last_line_s = float("-inf")
        self._last_stage = ""
        self._live = (
            Live(panel(record), console=console, refresh_per_second=4, transient=True)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> LiveView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.update(panel(self._record))
            self._live.stop()

    def update(self) -> None:
        """Shows the record's present state; cheap to call often."""
        if self._live:
            self._live.update(panel(self._record))
            return
        now = self._clock()
        if self._record.stage != self._last_stage or now - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = now
            self._last_stage = self._record.stage
            self._console.print(line(self._record), highlight=False, soft_wrap=True)
