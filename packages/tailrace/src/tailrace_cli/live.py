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
    staleness_histogram,
    time_share,
)

BLOCKS = "▁▂▃▄▅▆▇█"
LINE_EVERY_S = 5.0


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


def line(record: RunRecord) -> str:
    """The state of a run in one line."""
    parts = [f"{record.wall_s:5.0f} s", record.stage]
    if record.stage == "sft" and record.traces[0] < record.traces[1]:
        parts.append(f"expert traces {record.traces[0]}/{record.traces[1]}")
    if record.stage == "sft" and record.sft_steps:
        last = record.sft_steps[-1]
        parts.append(f"step {last.step}/{record.steps_total.get('sft', 0)}")
        parts.append(f"loss {last.values.get('loss', float('nan')):.3f}")
    if record.stage == "rl" and record.rl_steps:
        last = record.rl_steps[-1]
        parts.append(f"step {last.step}/{record.steps_total.get('rl', 0)}")
        parts.append(f"reward {last.values.get('reward.mean', float('nan')):.3f}")
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
    rows: list[RenderableType] = [
        Text(f"{record.stage}  {record.wall_s:.0f} s", style="bold cyan"),
        Text(f"pass@1 on held-out tasks (seed {record.seed})", style="dim"),
        stages,
    ]
    for label, steps in (("sft", record.sft_steps), ("rl", record.rl_steps)):
        total = record.steps_total.get(label, 0)
        if steps and total:
            rows.append(
                Group(
                    Text(f"{label} step {steps[-1].step} of {total}", style="bold"),
                    ProgressBar(total=total, completed=steps[-1].step, width=40),
                )
            )
    if record.traces[0] < record.traces[1]:
        rows.append(Text(f"expert traces {record.traces[0]} of {record.traces[1]}"))
    if record.rl_steps:
        rows += _learning(record)
    rows += [Text(note, style="yellow") for note in record.notes[-3:]]
    return Group(*rows)


def _learning(record: RunRecord) -> list[RenderableType]:
    last = record.rl_steps[-1]
    rewards = [s.values.get("reward.mean", 0.0) for s in record.rl_steps]
    shares = time_share(record)
    histogram = staleness_histogram(record)
    return [
        Text(f"reward     {sparkline(rewards)} {rewards[-1]:.3f}"),
        Text(
            f"staleness  {' '.join(f'{k}: {n}' for k, n in histogram.items())} "
            f"(bound {record.staleness_bound})"
        ),
        Text(
            f"in flight  {last.values.get('attempts_in_flight', 0):.0f} trajectories, "
            f"{record.groups[0]} groups; {record.groups[1]} groups ready"
        ),
        Text("time       " + "  ".join(f"{name} {shares[name]:.0%}" for name in TIME_SHARES)),
    ]


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
