from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpo_trainer.backends.torch import TorchBackend
from grpo_trainer.checkpoint import CheckpointStore
from grpo_trainer.config import SftConfig
from grpo_trainer.errors import TraceError
from grpo_trainer.events import EventKind, EventLog
from grpo_trainer.sft.render import render
from grpo_trainer.sft.stage import SftStage, load_sequences
from grpo_trainer.sft.traces import parse_trace, read_traces
from grpo_trainer.stage import PolicyState, StageContext, StageState
from grpo_trainer.testing.models import write_model, write_tokenizer
from rollout_engine.agents.template import ChatTemplate, Message


def trajectory(*turns: tuple[str, str | None], solved: bool | None = True) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"step_id": 1, "source": "user", "message": "fix add"}]
    for command, output in turns:
        step: dict[str, Any] = {
            "step_id": len(steps) + 1,
            "source": "agent",
            "message": command,
        }
        if output is not None:
            step["observation"] = {"results": [{"content": output}]}
        steps.append(step)
    return {
        "schema_version": "ATIF-v1.8",
        "session_id": "s",
        "agent": {"name": "expert", "version": "1"},
        "steps": steps,
        "extra": {"task_id": "t", "solved": solved},
    }


def line(**changes: Any) -> str:
    return json.dumps(trajectory(("ls", "a b"), ("submit", None)) | changes)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "model", scale=0.05)
    write_tokenizer(folder)
    return folder


# --- traces


def test_a_trajectory_is_read_as_opening_and_turns() -> None:
    trace = parse_trace(line(), "f:1")
    assert trace.opening == (Message("user", "fix add"),)
    assert [(turn.text, [m.content for m in turn.observations]) for turn in trace.turns] == [
        ("ls", ["a b"]),
        ("submit", []),
    ]
    assert trace.solved is True


def test_an_empty_observation_is_one() -> None:
    trace = parse_trace(json.dumps(trajectory(("true", ""), ("submit", None))), "f:1")
    assert trace.turns[0].observations == (Message("user", ""),)


def steps(*changes: tuple[int, dict[str, Any]]) -> dict[str, Any]:
    made = trajectory(("ls", "a"), ("submit", None))["steps"]
    for index, change in changes:
        made[index] = made[index] | change
    return {"steps": made}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "f:1: not JSON"),
        ("[]", "f:1: expected an object"),
        (line(schema_version="OTHER"), "expected schema_version ATIF-v1.x, found 'OTHER'"),
        (line(colour="red"), r"unknown fields \['colour'\]"),
        (line(steps=[]), "expected steps"),
        (line(**steps((1, {"step_id": 7}))), "step 2: expected step_id 2, found 7"),
        (line(**steps((1, {"source": "robot"}))), "step 2: expected source system, user or agent"),
        (line(**steps((1, {"message": None}))), "step 2: expected message to be text"),
        (line(**steps((1, {"observation": None}))), "turn 1 of 2 has no observation"),
        (line(**steps((1, {"observation": {"results": 3}}))), "results to be a list"),
        (line(**steps((1, {"observation": {"results": [{}]}}))), "content to be text"),
        (line(**steps((1, {"tool_calls": [{"a": 1}]}))), "tool_calls and reasoning_content"),
        (line(steps=trajectory()["steps"]), "expected a user's step and then an agent's"),
        (line(subagent_trajectories=[{}]), "sub-agents"),
        (line(extra={"solved": "yes"}), "expected extra.solved to be true or false"),
    ],
)
def test_a_line_that_is_no_trajectory_is_refused_with_place_and_reason(
    text: str, words: str
) -> None:
    with pytest.raises(TraceError, match=words):
        parse_trace(text, "f:1")


def test_the_error_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    file.write_text(line() + "\n\n" + "{\n")
    with pytest.raises(TraceError, match=r"traces\.jsonl:3: not JSON"):
        list(read_traces([file]))
    with pytest.raises(TraceError, match=r"missing\.jsonl: cannot be read"):
        list(read_traces([tmp_path / "missing.jsonl"]))


# --- rendering


def test_tokens_are_the_ones_that_the_agent_loop_would_have_made(model: Path) -> None:
    template = ChatTemplate.from_folder(model)
    made = render(parse_trace(line(), "f:1"), template, observation_weight=0.3, prompt_weight=0.1)
    looped = np.concatenate(
        [
            template.prompt([Message("user", "fix add")]),
            template.assistant("ls"),
            template.continuation([Message("user", "a b")]),
            template.assistant("submit"),
        ]
    )
    assert made.token_ids.tolist() == looped.tolist()
    spoken = [template.text(part) for part in np.split(made.token_ids, edges(made.assistant))[1::2]]
    assert spoken == ["ls", "submit"]


def edges(mask: np.ndarray[Any, np.dtype[np.bool_]]) -> list[int]:
    return [int(at) for at in np.flatnonzero(np.diff(mask.astype(int))) + 1]


def test_weights_tell_assistant_observation_and_opening_apart(model: Path) -> None:
    template = ChatTemplate.from_folder(model)
    made = render(parse_trace(line(), "f:1"), template, observation_weight=0.3, prompt_weight=0.1)
    opening = len(template.prompt([Message("user", "fix add")]))
    assert set(made.weights[:opening].tolist()) == {np.float32(0.1)}
    rest = made.weights[opening:]
    assert set(rest[made.assistant[opening:]].tolist()) == {1.0}
    assert set(rest[~made.assistant[opening:]].tolist()) == {np.float32(0.3)}


# --- loading


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    file = tmp_path / "traces.jsonl"
    rng = np.random.default_rng(0)
    lines = []
    for number in range(40):
        word = "".join(rng.choice(list("abcdef"), int(rng.integers(2, 12))))
        turns = ((f"grep {word}", f"1:{word}"), (f"echo {word}", word), ("submit", None))
        lines.append(json.dumps(trajectory(*turns, solved=number % 4 == 0)))
    file.write_text("\n".join(lines))
    return file


def test_successes_long_traces_and_counts_are_picked(model: Path, traces: Path) -> None:
    template = ChatTemplate.from_folder(model)

    def load(**settings: Any) -> tuple[int, str]:
        config = SftConfig(traces=(traces,), **settings)
        sequences, left_out = load_sequences(config, template, context_tokens=512)
        return len(sequences), left_out

    assert load() == (40, "")
    assert load(max_traces=7) == (7, "")
    kept, left_out = load(successes_only=True)
    assert kept == 10
    assert "left out 30 traces not marked as solved" in left_out
    shorter, left_out = load(max_tokens=60)
    assert 0 < shorter < 40
    assert f"{40 - shorter} longer than 60" in left_out
    with pytest.raises(TraceError, match="no trajectory to train on is left"):
        load(max_tokens=5)


# --- the stage


@pytest.fixture
def make(model: Path, traces: Path, tmp_path: Path) -> Callable[..., tuple[SftStage, StageContext]]:
    def build(config: SftConfig, folder: str = "stage") -> tuple[SftStage, StageContext]:
        sequences, _ = load_sequences(config, ChatTemplate.from_folder(model), context_tokens=512)
        backend = TorchBackend(model)
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        checkpoints = CheckpointStore(place / "checkpoints", stage="sft", keep=2)
        policy, step = PolicyState(), 0
        if checkpoints.newest() is None:
            backend.start_optimizer(config.optimizer)
        else:
            checkpoint = checkpoints.read_newest()
            backend.load(checkpoint.folder, optimizer=config.optimizer)
            policy, step = PolicyState.from_json(checkpoint.state["policy"]), checkpoint.step
        events = EventLog(place / "events.jsonl")
        context = StageContext("run", "sft", events, checkpoints, policy, in_place)
        return SftStage(context, backend, config, sequences, step=step), context

    return build


async def in_place(work: Callable[[], Any]) -> Any:
    await asyncio.sleep(0)
    return work()


def recipe(traces: Path, **changes: Any) -> SftConfig:
    settings = {"traces": [traces], "batch_size": 8, "checkpoint": {"every_steps": 4}}
    return SftConfig.model_validate(settings | changes)


async def test_one_pass_over_the_traces_unless_steps_are_given(
    make: Callable[..., tuple[SftStage, StageContext]], traces: Path
) -> None:
    stage, context = make(recipe(traces))
    assert stage.steps_total == 5
    assert await stage.run() is StageState.FINISHED
    assert context.policy.step == 5
    assert make(recipe(traces, steps=12), "other")[0].steps_total == 12


async def test_the_stage_learns_the_traces(
    make: Callable[..., tuple[SftStage, StageContext]], traces: Path
) -> None:
    optimizer = {"kind": "muon", "learning_rate": 1e-2, "warmup_steps": 3}
    stage, context = make(recipe(traces, steps=40, optimizer=optimizer))
    await stage.run()
    losses = [
        event.data["values"]["loss.assistant"]
        for event in context.events.events
        if event.kind is EventKind.STEP
    ]
    assert np.mean(losses[-3:]) < 0.6 * np.mean(losses[:3])


async def test_a_stage_stopped_and_resumed_equals_an_uninterrupted_one_bit_for_bit(
    make: Callable[..., tuple[SftStage, StageContext]], traces: Path, tmp_path: Path
) -> None:
    config = recipe(traces, steps=11)
    whole, _ = make(config, "whole")
    await whole.run()
    steps_seen = []
    for stop_after in (3, 8, 99):
        stage, context = make(config, "parts")

        async def stop(context: StageContext = context, after: int = stop_after) -> None:
            async for event in context.events.follow(0):
                if event.kind is EventKind.STEP and event.data["step"] >= after:
                    context.stop.set()

        stopping = asyncio.ensure_future(stop())
        await stage.run()
        stopping.cancel()
        steps_seen.append(stage.step)
    assert 3 <= steps_seen[0] < steps_seen[1] < 11
    assert steps_seen[2] == 11

    def weights(folder: str) -> dict[str, bytes]:
        newest = CheckpointStore(
            tmp_path / folder / "checkpoints", stage="sft", keep=2
        ).read_newest()
        assert newest.step == 11
        held = TorchBackend(newest.folder).weights()
        return {name: np.asarray(tensor).tobytes() for name, tensor in held.items()}

    assert weights("parts") == weights("whole")
