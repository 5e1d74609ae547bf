"""The record is the one model behind table, JSON, live view and report."""

from typing import Any

from tailrace_cli.demo.record import (
    fold,
    kinds_improved,
    outcomes,
    result,
    staleness_histogram,
    time_share,
)


def evaluation(name: str, pass1: float, kinds: dict[str, float], t: float = 5.0) -> dict[str, Any]:
    return {
        "time_s": t,
        "kind": "evaluation",
        "name": name,
        "pass1": pass1,
        "ci95": [pass1 - 0.05, pass1 + 0.05],
        "tasks": 100,
        "attempts": 4,
        "pass_at_k": pass1,
        "outcomes": {},
        "by_kind": [{"name": k, "tasks": 10, "pass_rate": r} for k, r in kinds.items()],
        "versions": [1],
    }


def step(
    number: int, t: float, counts: dict[str, int] | None = None, **values: float
) -> dict[str, Any]:
    return {
        "time_s": t,
        "kind": "step",
        "stage": "rl",
        "step": number,
        "values": {k.replace("__", "."): v for k, v in values.items()},
        "counts": counts or {},
    }


def started(t: float) -> dict[str, Any]:
    return {
        "time_s": t,
        "kind": "started",
        "seed": 3,
        "steps_total": {"sft": 10, "rl": 20},
        "staleness_bound": 2,
    }


def test_result_has_every_figure_of_a_finished_run() -> None:
    counts = {"outcome.SOLVED": 3, "outcome.FAULT": 1, "staleness.0": 2, "staleness.2": 2}
    times = {"time__actor_update_s": 3.0, "time__rollout_wait_s": 1.0}
    record = fold(
        [
            started(100.0),
            step(1, 110.0, counts, **times),
            step(2, 120.0, counts, **times),
            evaluation("base", 0.0, {}),
            evaluation("sft", 0.2, {}),
            evaluation("rl", 0.5, {}, t=160.0),
        ]
    )
    document = result(record)
    assert document["stages"]["rl"] == {
        "pass1": 0.5,
        "ci95": [0.45, 0.55],
        "tasks": 100,
        "attempts": 4,
    }
    assert document["wall_s"] == 60.0
    assert document["steps"] == 2
    assert document["outcomes"] == {"FAULT": 2, "SOLVED": 6}
    assert document["faults_trained"] == 0
    assert document["staleness"] == {"mean": 1.0, "max": 2, "bound": 2}
    assert document["time_share"]["actor_update"] == 0.75
    assert document["seed"] == 3


def test_steps_taken_again_after_a_crash_replace_the_lost_ones() -> None:
    record = fold(
        [
            step(1, 1.0, {"outcome.SOLVED": 1}),
            step(2, 2.0, {"outcome.SOLVED": 10}),
            step(3, 3.0, {"outcome.SOLVED": 100}),
            step(2, 9.0, {"outcome.SOLVED": 5}),
        ]
    )
    assert [s.step for s in record.rl_steps] == [1, 2]
    assert outcomes(record) == {"SOLVED": 6}


def test_wall_time_leaves_out_the_pause_between_stop_and_resume() -> None:
    beat = {"time_s": 150.0, "kind": "heartbeat"}
    record = fold([started(100.0), beat, started(1000.0), {"time_s": 1010.0, "kind": "heartbeat"}])
    assert record.wall_s == 60.0


def test_shares_are_zero_without_steps_and_sum_to_one_with() -> None:
    assert sum(time_share(fold([])).values()) == 0.0
    record = fold([step(1, 1.0, time__weight_sync_s=1.0, time__logprob_recompute_s=3.0)])
    assert sum(time_share(record).values()) == 1.0


def test_staleness_histogram_adds_up_over_steps() -> None:
    record = fold([step(1, 1.0, {"staleness.1": 4}), step(2, 2.0, {"staleness.1": 1})])
    assert staleness_histogram(record) == {1: 5}


def test_only_kinds_that_rose_count_as_improved() -> None:
    record = fold(
        [
            evaluation("sft", 0.2, {"up": 0.1, "down": 0.4, "same": 0.3}),
            evaluation("rl", 0.5, {"up": 0.2, "down": 0.3, "same": 0.3}),
        ]
    )
    assert kinds_improved(record) == ["up"]


def test_events_of_a_later_version_are_left_alone() -> None:
    assert fold([{"time_s": 1.0, "kind": "from_the_future"}]).now_s == 1.0
