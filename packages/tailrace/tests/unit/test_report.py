"""The report is one file that opens anywhere and says what the run did."""

import re
from pathlib import Path

import pytest
from tailrace_cli.demo.folder import FolderError, RunFolder
from tailrace_cli.demo.options import DemoOptions
from tailrace_cli.report import write_report


def record_run(path: Path, *, finished: bool) -> None:
    times = iter(range(1000, 5000))
    folder = RunFolder.create(path, DemoOptions(seed=4), lambda: float(next(times)))
    folder.record("started", seed=4, steps_total={"sft": 2, "rl": 12}, staleness_bound=2)
    for stage, pass1 in (("base", 0.01), ("sft", 0.21), ("rl", 0.55)):
        folder.record(
            "evaluation",
            name=stage,
            pass1=pass1,
            ci95=[pass1 - 0.01, pass1 + 0.05],
            pass_at_k=pass1,
            tasks=100,
            attempts=4,
            outcomes={"SOLVED": 3},
            by_kind=[{"name": "flip <b>", "tasks": 9, "pass_rate": pass1}],
            versions=[1],
        )
    for number in range(1, 13):
        folder.record(
            "step",
            stage="rl",
            step=number,
            values={
                "reward.mean": number / 20,
                "staleness.mean": 1.0,
                "staleness.max": 2.0,
                "tokens.p50": 100.0,
                "tokens.p90": 130.0,
                "tokens.max": 180.0,
                "duration.tail_ratio": 0.3,
                "time.actor_update_s": 2.0,
                "time.rollout_wait_s": 1.0,
                "time.logprob_recompute_s": 0.3,
                "time.weight_sync_s": 0.1,
            },
            counts={"outcome.SOLVED": 40, "outcome.UNSOLVED": 88, "staleness.1": 128},
        )
    if finished:
        folder.record("finished")
    folder.close()


def test_page_holds_figures_and_plots_and_fetches_nothing(tmp_path: Path) -> None:
    record_run(tmp_path / "run", finished=True)
    text = write_report(tmp_path / "run").read_text()
    assert text.count("<svg") == 9
    assert "0.550" in text
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text.replace('xlink:href="#', ""))
    assert "has not finished" not in text


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    record_run(tmp_path / "run", finished=False)
    assert "has not finished" in write_report(tmp_path / "run").read_text()


def test_a_run_that_only_just_started_has_a_report_too(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", DemoOptions(), lambda: 1.0).close()
    assert "<svg" in write_report(tmp_path / "run").read_text()


def test_names_of_kinds_cannot_break_the_page(tmp_path: Path) -> None:
    record_run(tmp_path / "run", finished=True)
    assert "<b>" not in write_report(tmp_path / "run").read_text()


def test_no_run_no_report(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="holds no demo run"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ({"sft": 0.2, "rl": 0.5}, "It shows that the policy improves"),
        ({"sft": 0.2, "rl": 0.25}, "It does not show that the policy improves"),
        ({"sft": 0.5, "rl": 0.2}, "It shows that the policy got worse"),
        ({"sft": 0.5}, "It says nothing about reinforcement learning"),
    ],
)
def test_the_page_claims_no_more_than_the_intervals_allow(
    tmp_path: Path, scores: dict[str, float], expected: str
) -> None:
    folder = RunFolder.create(tmp_path / "run", DemoOptions(), lambda: 1.0)
    folder.record("started", seed=0, steps_total={"sft": 1, "rl": 1}, staleness_bound=2)
    for stage, pass1 in scores.items():
        folder.record(
            "evaluation",
            name=stage,
            pass1=pass1,
            ci95=[pass1 - 0.05, pass1 + 0.05],
            pass_at_k=pass1,
            tasks=100,
            attempts=4,
            outcomes={},
            by_kind=[],
            versions=[1],
        )
    folder.close()
    assert expected in write_report(tmp_path / "run").read_text()
