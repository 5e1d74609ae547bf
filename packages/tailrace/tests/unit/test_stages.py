"""The stages against services that answer from a script: what is asked, recorded and left out."""

from __future__ import annotations

import asyncio
import itertools
import tomllib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from service_kit.config import ConfigError
from tailrace.eval.v1 import eval_service_pb2 as eval_pb
from tailrace_cli.demo.folder import RunFolder, read_events
from tailrace_cli.demo.options import Control, DemoOptions
from tailrace_cli.demo.recipes import recipes_of
from tailrace_cli.demo.record import RunRecord, fold, result
from tailrace_cli.demo.services import (
    StageBegan,
    StageEnd,
    StageEvent,
    StageNote,
    StageStep,
    StageVersion,
)
from tailrace_cli.demo.stages import Demo

PASS1 = {"base": 0.0, "sft": 0.25, "rl": 0.5}
COUNTS = {"outcome.SOLVED": 3, "outcome.UNSOLVED": 5, "staleness.0": 4, "staleness.1": 4}
VALUES = {"reward.mean": 0.375, "time.actor_update_s": 3.0, "time.rollout_wait_s": 1.0}


class KilledError(Exception):
    pass


@dataclass
class FakeServices:
    """Answers at once; `die_at` makes one call fail as a kill of the whole run would."""

    die_at: str = ""
    finished: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    recipes: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: dict[str, eval_pb.EvaluateRequest] = field(default_factory=dict)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    wait_for_stop: bool = False
    began: set[str] = field(default_factory=set)
    version: int = 0

    def _call(self, call: str) -> None:
        self.calls.append(call)
        if call == self.die_at:
            raise KilledError(call)

    async def publish(self, stage: str) -> int:
        self._call(f"publish {stage}")
        self.version += 1
        return self.version

    async def await_version(self, number: int) -> None:
        self._call(f"await {number}")

    async def evaluate(
        self, request: eval_pb.EvaluateRequest
    ) -> AsyncIterator[eval_pb.EvaluationProgress | eval_pb.EvaluationReport]:
        name, _, version = request.name.rpartition("-v")
        assert int(version) == request.version
        self._call(f"evaluate {name} at {version}")
        self.requests[name] = request
        total = request.tasks * request.attempts
        yield eval_pb.EvaluationProgress(attempts_done=1, attempts_total=total, solved=0)
        if f"within {name}" == self.die_at:
            raise KilledError(self.die_at)
        pass1 = PASS1[name]
        yield eval_pb.EvaluationReport(
            name=request.name,
            tasks=request.tasks,
            attempts=request.attempts,
            pass_at_1=pass1,
            pass_at_1_ci95=eval_pb.Interval(low=pass1 - 0.05, high=pass1 + 0.05),
            versions=[request.version],
            outcomes={"SOLVED": 1},
        )

    async def follow_stage(
        self, name: str, recipe_toml: str, *, cursor: int
    ) -> AsyncIterator[StageEvent]:
        """The trainer's events of a stage: two for each step of learning, one of others."""
        self._call(f"stage {name}")
        recipe = self.recipes[name] = tomllib.loads(recipe_toml)
        self.began.add(name)
        steps = recipe["steps"]
        yield StageBegan(steps if name in self.finished else 0)
        if name not in self.finished:
            numbers = itertools.count(1)
            for step in range(1, steps + 1):
                if (at := next(numbers)) > cursor:
                    yield StageStep(at, step, VALUES, COUNTS)
                if name == "rl":
                    self.version = 10 + step
                    if (at := next(numbers)) > cursor:
                        yield StageVersion(at, self.version, step)
                if f"{name} step {step}" == self.die_at:
                    raise KilledError(self.die_at)
                if name == "rl" and self.wait_for_stop:
                    await self.stopped.wait()
                    yield StageEnd("stopped", step)
                    return
            yield StageNote(next(numbers), "one epoch")
        self.finished.add(name)
        yield StageEnd("finished", steps)

    async def stop_stage(self, name: str) -> None:
        assert name in self.began, "stopped before it was started"
        self.calls.append(f"stop {name}")
        self.stopped.set()

    async def activity(self) -> tuple[int, int] | None:
        return (3, 1)


async def collect(file: Path, progress: Callable[[int, int], None]) -> None:
    progress(0, 2)
    file.write_text("{}\n{}\n")  # noqa: ASYNC240
    progress(2, 2)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += 0.25
        return self.now_s


def start(folder: RunFolder) -> RunRecord:
    recipes = recipes_of(folder.options)
    record = fold(read_events(folder.path))
    record.apply(
        folder.record(
            "started",
            seed=folder.options.seed,
            steps_total={name: recipe["steps"] for name, recipe in recipes.items()},
            staleness_bound=recipes["rl"]["admission"]["staleness_bound"],
        )
    )
    return record


async def play(folder: RunFolder, services: FakeServices) -> RunRecord:
    record = start(folder)
    await Demo(folder, record, services, collect, lambda: None).run()
    return record


def new(folder: Path, **options: Any) -> RunFolder:
    defaults: dict[str, Any] = {"steps": 2, "eval_tasks": 100, "overrides": ("sft.steps=3",)}
    return RunFolder.create(folder / "run", DemoOptions(**defaults | options), Clock())


async def test_a_whole_run_goes_through_all_stages_in_order_and_gives_the_whole_result(
    tmp_path: Path,
) -> None:
    services = FakeServices()
    record = await play(new(tmp_path, seed=3), services)

    assert services.calls[0] == "publish base"
    assert set(services.calls[1:3]) == {"evaluate base at 1", "stage sft"}
    assert services.calls[3:] == [
        "publish sft",
        "evaluate sft at 2",
        "stage rl",
        "publish rl",
        "evaluate rl at 13",
    ]
    assert record.finished
    stage = {"tasks": 100, "attempts": 4}
    assert result(record) == {
        "stages": {
            "base": {"pass1": 0.0, "ci95": [-0.05, 0.05], **stage},
            "sft": {"pass1": 0.25, "ci95": [0.2, 0.3], **stage},
            "rl": {"pass1": 0.5, "ci95": [0.45, 0.55], **stage},
        },
        "wall_s": round(record.wall_s, 1),
        "steps": 2,
        "outcomes": {"SOLVED": 6, "UNSOLVED": 10},
        "faults_trained": 0,
        "staleness": {"mean": 0.5, "max": 1, "bound": 2},
        "time_share": {
            "actor_update": 0.75,
            "rollout_wait": 0.25,
            "logprob_recompute": 0.0,
            "weight_sync": 0.0,
        },
        "seed": 3,
    }
    assert record.wall_s > 0


async def test_events_alone_give_the_same_record_again(tmp_path: Path) -> None:
    folder = new(tmp_path)
    record = await play(folder, FakeServices())
    assert fold(read_events(folder.path)) == record


async def test_every_stage_is_scored_on_the_same_tasks_with_the_same_seeds(tmp_path: Path) -> None:
    services = FakeServices()
    await play(new(tmp_path, seed=1), services)
    lists = {
        (r.task_set, r.tasks, r.task_seed, r.attempts, r.sampling.seed)
        for r in services.requests.values()
    }
    assert len(services.requests) == 3
    assert len(lists) == 1


@pytest.mark.parametrize(
    ("die_at", "left_out", "still_done"),
    [
        ("publish sft", {"publish base", "evaluate base at 1"}, {"stage sft", "stage rl"}),
        ("within base", {"publish base"}, {"await 1", "evaluate base at 1", "stage sft"}),
        ("within sft", {"publish sft"}, {"await 2", "evaluate sft at 2", "stage rl"}),
        ("within rl", {"publish rl"}, {"await 13", "evaluate rl at 13"}),
        ("rl step 1", {"publish base", "publish sft"}, {"stage rl", "publish rl"}),
        ("publish rl", {"publish base", "publish sft"}, {"stage rl", "publish rl"}),
    ],
)
async def test_a_resumed_run_does_what_is_missing_and_no_more(
    tmp_path: Path, die_at: str, left_out: set[str], still_done: set[str]
) -> None:
    folder = new(tmp_path)
    first = FakeServices(die_at=die_at)
    with pytest.raises((KilledError, ExceptionGroup)):
        await play(folder, first)
    folder.close()

    again = RunFolder.resume(folder.path, Clock())
    services = FakeServices(finished=set(first.finished))
    traces = (folder.path / "traces.jsonl").stat()
    record = await play(again, services)

    assert not left_out & set(services.calls)
    assert still_done <= set(services.calls)
    assert record.finished
    assert set(result(record)["stages"]) == {"base", "sft", "rl"}
    assert [s.step for s in record.rl_steps] == [1, 2]
    assert (folder.path / "traces.jsonl").stat() == traces, "traces were collected anew"


async def test_a_resumed_run_records_each_event_of_a_stage_once(tmp_path: Path) -> None:
    folder = new(tmp_path)
    with pytest.raises((KilledError, ExceptionGroup)):
        await play(folder, FakeServices(die_at="rl step 1"))
    folder.close()
    await play(RunFolder.resume(folder.path, Clock()), FakeServices())
    events = [e for e in read_events(folder.path) if e.get("stage") == "rl" and "cursor" in e]
    assert [e["cursor"] for e in events] == [1, 2, 3, 4, 5]
    assert [e["step"] for e in events if e["kind"] == "step"] == [1, 2]


async def test_an_evaluation_starts_anew_if_other_weights_came_after_it(tmp_path: Path) -> None:
    folder = new(tmp_path)
    with pytest.raises((KilledError, ExceptionGroup)):
        await play(folder, FakeServices(die_at="within base"))
    folder.record("version", number=9, step=0, stage="elsewhere")
    folder.close()
    services = FakeServices(version=9)
    await play(RunFolder.resume(folder.path, Clock()), services)
    assert {"publish base", "evaluate base at 10"} <= set(services.calls)


async def test_a_stage_that_goes_on_says_from_where(tmp_path: Path) -> None:
    record = await play(new(tmp_path), FakeServices(finished={"sft"}))
    assert record.notes[0] == "stage sft goes on from step 3"


async def test_when_time_is_up_the_learning_stage_is_stopped_and_still_scored(
    tmp_path: Path,
) -> None:
    services = FakeServices(wait_for_stop=True)
    record = await play(new(tmp_path, minutes=0.01, steps=50), services)
    assert services.calls[-3:] == ["stop rl", "publish rl", "evaluate rl at 12"]
    assert result(record)["steps"] == 1
    assert any("time is up" in note for note in record.notes)


async def test_without_a_limit_nothing_is_stopped(tmp_path: Path) -> None:
    services = FakeServices()
    await play(new(tmp_path), services)
    assert not [call for call in services.calls if call.startswith("stop")]


async def test_sync_trains_on_the_newest_weights_alone(tmp_path: Path) -> None:
    services = FakeServices()
    record = await play(new(tmp_path, sync=True), services)
    assert services.recipes["rl"]["mode"] == "sync"
    assert services.recipes["rl"]["admission"]["staleness_bound"] == 0
    assert result(record)["staleness"]["bound"] == 0


async def test_each_control_changes_one_thing(tmp_path: Path) -> None:
    recipes: dict[Control, FakeServices] = {}
    for control in Control:
        services = recipes[control] = FakeServices()
        folder = tmp_path / control.value
        await play(new(folder, control=control), services)
    plain = recipes[Control.NONE].recipes

    def changed(control: Control, stage: str) -> dict[str, Any]:
        recipe = recipes[control].recipes[stage]
        return {k: v for k, v in recipe.items() if plain[stage].get(k) != v and k != "traces"}

    assert changed(Control.SHUFFLED_REWARDS, "rl") == {"shuffle_rewards": True}
    assert changed(Control.SHUFFLED_REWARDS, "sft") == {}
    assert changed(Control.SFT_SUCCESSES, "sft") == {"successes_only": True}
    assert changed(Control.SFT_SUCCESSES, "rl") == {}
    assert "rl" not in recipes[Control.MORE_SFT].recipes


async def test_more_sft_takes_more_steps_and_ends_without_learning(tmp_path: Path) -> None:
    services = FakeServices()
    record = await play(new(tmp_path, control=Control.MORE_SFT, overrides=()), services)
    plain = recipes_of(DemoOptions())["sft"]["steps"]
    assert services.recipes["sft"]["steps"] == 4 * plain
    assert record.finished
    assert set(result(record)["stages"]) == {"base", "sft"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rl.batch_group=8", r"did you mean rl\.batch_groups"),
        ("sft.steps=many", "sft.steps: Input should be a valid integer"),
        ("rl.loss.clip_low=9", "less than or equal to 1"),
    ],
)
def test_a_recipe_that_the_trainer_would_refuse_is_refused_at_once(
    setting: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        recipes_of(DemoOptions(overrides=(setting,)))
