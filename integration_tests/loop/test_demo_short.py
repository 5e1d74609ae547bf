"""`tailrace demo` as a user runs it: the real base model, the embedded engine, every service.

Too short to learn much: what it must show is that the whole loop closes and tells the truth.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tailrace_cli.demo.folder import read_events

from integration_tests.harness import needs_root
from integration_tests.processes import alive, descendants, identity

pytestmark = [needs_root, pytest.mark.timeout(900)]  # a minute where nothing else runs

STEPS = 2
TASKS = 8
OPTIONS = (
    *("--steps", str(STEPS), "--tasks", str(TASKS), "--traces", "100", "--seed", "1"),
    *("--set", "sft.steps=100", "--set", "rl.batch_groups=2", "--set", "rl.group_size=8"),
)
RUN_S = 500
STOP_S = 20


def demo(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tailrace_cli", "demo", "--json", *arguments]


@dataclass(frozen=True)
class Finished:
    """A run that came to its end."""

    folder: Path
    code: int
    stdout: str
    stderr: str

    @property
    def result(self) -> dict[str, Any]:
        """The last line of stdout."""
        document = json.loads(self.stdout.splitlines()[-1])
        assert isinstance(document, dict)
        return document

    @property
    def events(self) -> list[dict[str, Any]]:
        """What the run recorded."""
        return [
            json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()
        ]

    def kinds(self, kind: str) -> Iterator[dict[str, Any]]:
        """Events of one kind."""
        return (event for event in self.events if event["kind"] == kind)


def run(folder: Path, *arguments: str) -> Finished:
    done = subprocess.run(
        demo(*arguments), capture_output=True, text=True, timeout=RUN_S, check=False
    )
    return Finished(folder, done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("demo") / "run"
    done = run(folder, *OPTIONS, "--out", str(folder))
    assert done.code == 0, done.stderr
    return done


def number(low: float, high: float) -> Any:
    class Within:
        def __eq__(self, other: object) -> bool:
            return (
                isinstance(other, int | float)
                and not isinstance(other, bool)
                and low <= other <= high
            )

        def __hash__(self) -> int:
            return 0

        def __repr__(self) -> str:
            return f"{low} to {high}"

    return Within()


SHARE = number(0, 1)
SCORE = {"pass1": SHARE, "ci95": [SHARE, SHARE], "tasks": TASKS, "attempts": 4}


def test_the_last_line_is_the_whole_result_and_nothing_but_it(finished: Finished) -> None:
    result = finished.result
    assert list(result) == [
        *("stages", "wall_s", "steps", "outcomes", "faults_trained", "staleness"),
        *("time_share", "seed"),
    ]
    assert result == {
        "stages": {"base": SCORE, "sft": SCORE, "rl": SCORE},
        "wall_s": number(5, RUN_S),
        "steps": STEPS,
        "outcomes": result["outcomes"],
        "faults_trained": 0,
        "staleness": {"mean": number(0, 2), "max": number(0, 2), "bound": 2},
        "time_share": {
            "actor_update": SHARE,
            "rollout_wait": SHARE,
            "logprob_recompute": SHARE,
            "weight_sync": SHARE,
        },
        "seed": 1,
    }
    assert set(result["outcomes"]) <= {"SOLVED", "UNSOLVED", "LIMIT_REACHED", "FAULT", "CANCELLED"}
    assert all(isinstance(count, int) for count in result["outcomes"].values())
    assert sum(result["time_share"].values()) == pytest.approx(1, abs=0.001)
    for stage in result["stages"].values():
        assert stage["ci95"][0] <= stage["pass1"] <= stage["ci95"][1]
    assert finished.stdout.count("\n") == 1, "stdout holds more than the result"
    assert json.loads((finished.folder / "result.json").read_text()) == result


def test_every_step_trained_groups_with_variance_and_no_fault(finished: Finished) -> None:
    steps = [event for event in finished.kinds("step") if event["stage"] == "rl"]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        # A batch is two groups; one without variance teaches nothing and is left out.
        assert 1 <= step["counts"]["decision.TRAINED"] <= 2
        assert step["counts"]["faults_trained"] == 0
        assert 0 < step["values"]["reward.mean"] < 1
    assert sum(finished.result["outcomes"].values()) >= STEPS * 2 * 8


def test_each_stage_was_scored_at_a_version_of_its_own_on_the_same_tasks(
    finished: Finished,
) -> None:
    evaluations = {event["name"]: event for event in finished.kinds("evaluation")}
    assert list(evaluations) == ["base", "sft", "rl"]
    versions = [evaluations[name]["versions"] for name in evaluations]
    assert all(len(found) == 1 for found in versions)
    assert versions == sorted(versions)
    assert len({found[0] for found in versions}) == 3
    tasks = {json.dumps([t[0] for t in e["by_task"]]) for e in evaluations.values()}
    assert len(tasks) == 1


def test_no_task_that_is_scored_was_trained_on(finished: Finished) -> None:
    [*scored] = {t[0] for event in finished.kinds("evaluation") for t in event["by_task"]}
    traces = (finished.folder / "traces.jsonl").read_text().splitlines()
    taught = {json.loads(line)["extra"]["task_id"] for line in traces}
    assert len(scored) == TASKS
    assert len(taught) == 100
    assert not taught & set(scored)


class Links(HTMLParser):
    """Everything a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "srcset") and value:
                self.found.append(value)


def test_the_report_is_one_file_that_needs_nothing_else(finished: Finished) -> None:
    text = (finished.folder / "report.html").read_text()
    links = Links()
    links.feed(text)
    assert [link for link in links.found if not link.startswith(("#", "data:"))] == []
    assert links.scripts == 0
    assert not re.search(r"@import|url\((?!['\"]?(#|data:))", text)
    assert text.count("<svg") == 9
    for stage in finished.result["stages"].values():
        assert f"{stage['pass1']:.3f}" in text


def test_a_second_run_does_not_touch_the_first(finished: Finished) -> None:
    def contents() -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in finished.folder.iterdir() if p.is_file()}

    before = contents()
    again = run(finished.folder, *OPTIONS, "--out", str(finished.folder))
    assert again.code == 2
    assert "exists and is not empty" in again.stderr
    assert contents() == before


def test_the_trainer_scores_tokens_of_its_own_version_as_the_engine_did(finished: Finished) -> None:
    steps = [event for event in finished.kinds("step") if event["stage"] == "rl"]
    compared = [step for step in steps if step["counts"]["mismatch_tokens"]]
    assert compared, "the first step's tokens are of the version held"
    assert max(step["values"]["mismatch.kl"] for step in compared) < 1e-10
    assert max(step["values"]["mismatch.max"] for step in compared) < 5e-5, "float32 gives 2e-5"


def test_resuming_a_finished_run_tells_its_result_again(finished: Finished) -> None:
    again = run(finished.folder, "--resume", str(finished.folder))
    assert again.code == 0, again.stderr
    assert again.result == finished.result


@pytest.mark.slow
def test_ctrl_c_stops_a_run_cleanly_and_resume_finishes_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    output = tmp_path / "output"
    with output.open("w") as out:
        process = subprocess.Popen(
            demo(*OPTIONS, "--out", str(folder)), stdout=out, stderr=out, start_new_session=True
        )
    me = identity(process.pid)
    assert me is not None

    def steps() -> int:
        events = read_events(folder) if (folder / "events.jsonl").exists() else []
        return sum(event["kind"] == "step" and event["stage"] == "sft" for event in events)

    deadline = time.monotonic() + RUN_S
    while steps() < 5:
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    family = descendants(process.pid)
    assert len(family) >= 6
    os.kill(process.pid, signal.SIGINT)
    began = time.monotonic()
    assert process.wait(3 * STOP_S) == 130
    took_s = time.monotonic() - began
    assert not alive(family)
    message = output.read_text()
    assert f"tailrace demo --resume {folder}" in message
    assert "Traceback" not in message
    assert (folder / "report.html").exists(), "an unfinished run has a report too"
    assert took_s < STOP_S, f"stopping took {took_s:.1f} s"

    finished = run(folder, "--resume", str(folder))
    assert finished.code == 0, finished.stderr
    assert finished.result["steps"] == STEPS
    assert set(finished.result["stages"]) == {"base", "sft", "rl"}
    assert finished.result["faults_trained"] == 0
    taught = [event["step"] for event in finished.kinds("step") if event["stage"] == "sft"]
    assert taught[-1] == 100
