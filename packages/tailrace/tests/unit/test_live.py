"""The view of a run: a panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from tailrace_cli.demo.record import RunRecord
from tailrace_cli.live import LINE_EVERY_S, LiveView, clock_time, line, panel, sparkline

STARTED = {
    "kind": "started",
    "seed": 3,
    "steps_total": {"sft": 10, "rl": 4},
    "staleness_bound": 2,
}


def event(time_s: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"time_s": time_s, "kind": kind, **fields}


def record_of(*events: dict[str, Any]) -> RunRecord:
    record = RunRecord()
    for one in ({"time_s": 0.0, **STARTED}, *events):
        record.apply(one)
    return record


def rl_step(number: int, reward: float) -> dict[str, Any]:
    return event(
        100.0 + number,
        "step",
        stage="rl",
        step=number,
        values={
            "reward.mean": reward,
            "attempts_in_flight": 24.0,
            "time.actor_update_s": 3.0,
            "time.rollout_wait_s": 1.0,
        },
        counts={"staleness.0": 8, "staleness.1": 8},
    )


def drawn(record: RunRecord, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(panel(record))
    return capture.get()


def test_a_run_that_has_only_started_has_a_panel() -> None:
    text = drawn(record_of())
    assert "seed 3" in text
    assert "starting, 0:00 min" in text


def test_the_panel_of_learning_shows_steps_reward_staleness_flight_and_time() -> None:
    text = drawn(
        record_of(
            event(90.0, "stage", name="rl"),
            rl_step(1, 0.25),
            rl_step(2, 0.5),
            event(103.0, "activity", in_flight=5, ready=2),
        )
    )
    assert "2/4" in text
    assert "0.500" in text
    assert "0: 16, 1: 16 trajectories (bound 2)" in text
    assert "24 trajectories in 5 groups, 2 more ready to be trained" in text
    assert "actor update 75%, rollout wait 25%" in text


def test_the_wait_for_the_first_step_shows_what_is_in_flight() -> None:
    text = drawn(
        record_of(event(90.0, "stage", name="rl"), event(93.0, "activity", in_flight=5, ready=0))
    )
    assert "5 groups, 0 more ready to be trained" in text


def test_an_evaluation_shows_its_progress_and_then_its_score() -> None:
    progress = event(5.0, "evaluation_progress", name="base", done=10, total=40, solved=1)
    assert "0.100  (10 of 40 attempts)" in drawn(record_of(progress))


def test_every_line_of_the_panel_is_a_line_of_its_own_on_a_narrow_terminal_too() -> None:
    record = record_of(event(90.0, "stage", name="rl"), rl_step(1, 0.25), rl_step(2, 0.5))
    for width in (60, 100, 200):
        lines = drawn(record, width).splitlines()
        assert all(len(text) <= width for text in lines)
        starts = [text.split()[0] for text in lines if text and not text.startswith(" ")]
        assert starts == ["tailrace", "stage", "pass@1", "rl", "reward", "staleness", "time"]


def test_names_from_outside_cannot_break_the_panel() -> None:
    assert "[/red] {x}" in drawn(record_of(event(1.0, "note", text="[/red] {x}")))


def test_without_a_terminal_there_is_a_line_now_and_then_and_at_every_new_stage() -> None:
    out = io.StringIO()
    now_s = 0.0
    record = record_of()
    with LiveView(record, Console(file=out, width=80), clock=lambda: now_s) as view:
        for _ in range(20):
            now_s += LINE_EVERY_S / 10
            view.update()
        assert len(out.getvalue().splitlines()) == 2
        record.apply(event(7.0, "stage", name="sft"))
        view.update()
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[-1].endswith("7 s  sft")
    assert "\x1b" not in out.getvalue()


def test_the_line_counts_traces_and_steps() -> None:
    record = record_of(event(3.0, "stage", name="expert traces"))
    record.apply(event(4.0, "traces", done=50, total=150))
    assert line(record).endswith("4 s  expert traces  50/150")
    record.apply(event(5.0, "traces", done=150, total=150))
    record.apply(event(5.0, "stage", name="sft"))
    record.apply(event(6.0, "step", stage="sft", step=2, values={"loss": 0.5}, counts={}))
    assert line(record).endswith("6 s  sft  step 2/10  loss 0.500")


def test_bars_are_scaled_to_the_top() -> None:
    assert sparkline([0.0, 0.5, 1.0], top=1.0) == "▁▅█"
    assert sparkline([]) == ""
    assert len(sparkline([1.0] * 99, width=40)) == 40


def test_time_is_minutes_and_seconds() -> None:
    assert [clock_time(s) for s in (0, 59.9, 61, 3605)] == [
        "0:00 min",
        "0:59 min",
        "1:01 min",
        "60:05 min",
    ]
