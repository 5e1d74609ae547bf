"""TrainerService over a real channel, with the other services simulated."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpo_trainer.app import make_backend
from grpo_trainer.config import TrainerConfig
from grpo_trainer.errors import CheckpointInvalid, RunConflict
from grpo_trainer.rollouts import GroupSource
from grpo_trainer.run import TrainerRun
from grpo_trainer.service import SERVICE_NAME, TrainerServicer
from grpo_trainer.testing.game import TASKS, TokenGame
from grpo_trainer.testing.models import DENSE, write_model, write_tokenizer
from grpo_trainer.testing.simulated import (
    SimulatedEngines,
    SimulatedLedger,
    SimulatedWeightSync,
)
from grpo_trainer.weights import WeightsPublisher
from service_kit.channel import ChannelConfig, open_channel
from service_kit.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Reason,
    Unavailable,
)
from service_kit.server import Server, ServerConfig, Service
from tailrace.trainer.v1 import trainer_service_pb2 as pb
from tailrace.trainer.v1 import trainer_service_pb2_grpc as pb_grpc

GRPO = """
task_set = "game"
steps = 4
batch_groups = 2
group_size = 4
[admission]
staleness_bound = 1
[optimizer]
learning_rate = 0.01
warmup_steps = 0
[checkpoint]
every_steps = 2
"""


class SimulatedPeers:
    """The other services, over any number of lives of the trainer."""

    def __init__(self, model: Path) -> None:
        self.weight_sync = SimulatedWeightSync()
        self.ledgers = {"engine-0": SimulatedLedger()}
        self.game = TokenGame(model)
        self.held_back: set[str] = set()
        self.known_numbers: list[int] = []
        self.unreachable = False

    async def acquire_publisher(self, *, known_number: int) -> WeightsPublisher:
        if self.unreachable:
            raise Unavailable("weight-sync cannot be reached")
        self.known_numbers.append(known_number)
        return self.weight_sync.acquire()

    async def list_tasks(self, task_set: str, *, limit: int) -> tuple[str, ...]:
        if task_set != "game":
            raise NotFound(f"no task set {task_set!r}")
        return TASKS[: limit or None]

    def group_source(
        self, consumer_id: str, *, incarnation: int, cursors: Mapping[str, int]
    ) -> GroupSource:
        assert consumer_id.startswith("game-run-")
        source = SimulatedEngines(self.weight_sync, self.game.play, self.ledgers)
        source.held_back = self.held_back
        return source


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "model", DENSE, scale=0.02)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def peers(model: Path) -> SimulatedPeers:
    return SimulatedPeers(model)


@pytest.fixture
def sft(tmp_path: Path) -> str:
    file = tmp_path / "traces.jsonl"
    steps = [
        {"step_id": 1, "source": "user", "message": "fix it"},
        {"step_id": 2, "source": "agent", "message": "submit"},
    ]
    trace = {"schema_version": "ATIF-v1.8", "session_id": "s", "agent": {}, "steps": steps}
    file.write_text("\n".join([json.dumps(trace)] * 8))
    return f'traces = ["{file}"]\nsteps = 6\nbatch_size = 4\n[checkpoint]\nevery_steps = 3\n'


def settings(tmp_path: Path, model: Path, **changes: Any) -> TrainerConfig:
    values = {"run": "game-run", "run_dir": tmp_path / "run", "model": model, "heartbeat_s": 0.1}
    return TrainerConfig.model_validate(values | changes)


@asynccontextmanager
async def serving(
    config: TrainerConfig, peers: SimulatedPeers
) -> AsyncIterator[pb_grpc.TrainerServiceAsyncStub]:
    """One life of the service."""
    run = TrainerRun(config, peers, make_backend)
    await run.open()
    servicer = TrainerServicer(run, heartbeat_s=config.heartbeat_s)
    register = partial(pb_grpc.add_TrainerServiceServicer_to_server, servicer)
    entry = Service(SERVICE_NAME, register, on_drain=run.stop_active)
    async with Server(ServerConfig(), [entry]) as server:
        stages = asyncio.ensure_future(run.serve())
        await asyncio.sleep(0)
        channel = open_channel(ChannelConfig(target=server.address, default_timeout_s=30))
        async with channel:
            yield pb_grpc.TrainerServiceStub(channel)
        await server.drain()
        stages.cancel()
        await asyncio.wait({stages})


def start(name: str, recipe: str, kind: int = pb.STAGE_KIND_GRPO) -> pb.StartStageRequest:
    return pb.StartStageRequest(name=name, kind=kind, recipe_toml=recipe)  # type: ignore[arg-type]


async def watched(
    stub: pb_grpc.TrainerServiceAsyncStub, name: str, cursor: int = 0
) -> list[pb.WatchStageResponse]:
    """Watch a stage to its end; heartbeats are left out."""
    async with asyncio.timeout(60):
        return [
            response
            async for response in stub.WatchStage(pb.WatchStageRequest(name=name, cursor=cursor))
            if response.WhichOneof("event") != "heartbeat"
        ]


def kinds(events: list[pb.WatchStageResponse]) -> list[str]:
    return [str(event.WhichOneof("event")) for event in events]


async def test_a_stage_is_started_watched_and_ends(
    tmp_path: Path, model: Path, peers: SimulatedPeers
) -> None:
    async with serving(settings(tmp_path, model), peers) as stub:
        assert (await stub.StartStage(start("rl", GRPO))).step == 0
        events = await watched(stub, "rl")
        assert kinds(events)[-1] == "ended"
        assert events[-1].ended.state == pb.STAGE_STATE_FINISHED
        steps = [event.step for event in events if event.WhichOneof("event") == "step"]
        assert [step.step for step in steps] == [1, 2, 3, 4]
        assert all(step.counts["faults_trained"] == 0 for step in steps)
        assert all(step.values["time.actor_update_s"] > 0 for step in steps)
        versions = [e.version.version for e in events if e.WhichOneof("event") == "version"]
        assert [version.step for version in versions] == [0, 1, 2, 3, 4]
        assert [event.cursor for event in events] == list(range(1, len(events) + 1))
        status = await stub.GetStatus(pb.GetStatusRequest())
        assert (status.run, status.incarnation, status.policy.step) == ("game-run", 1, 4)
        (stage,) = status.stages
        assert (stage.state, stage.step, stage.steps_total) == (pb.STAGE_STATE_FINISHED, 4, 4)


async def test_watching_goes_on_after_any_cursor(
    tmp_path: Path, model: Path, peers: SimulatedPeers
) -> None:
    async with serving(settings(tmp_path, model), peers) as stub:
        await stub.StartStage(start("rl", GRPO))
        everything = await watched(stub, "rl")
        for cursor in (1, len(everything) // 2, len(everything) - 1):
            assert await watched(stub, "rl", cursor) == everything[cursor:]
        assert kinds(await watched(stub, "rl", len(everything) + 7)) == ["ended"]
        with pytest.raises(NotFound, match="no stage is named 'other'"):
            await watched(stub, "other")


async def test_sft_then_grpo_hand_the_weights_on(
    tmp_path: Path, model: Path, peers: SimulatedPeers, sft: str
) -> None:
    async with serving(settings(tmp_path, model), peers) as stub:
        base = (await stub.PublishWeights(pb.PublishWeightsRequest(stage="base"))).version
        await stub.StartStage(start("sft", sft, pb.STAGE_KIND_SFT))
        assert (await watched(stub, "sft"))[-1].ended.steps == 6
        tuned = (await stub.PublishWeights(pb.PublishWeightsRequest(stage="sft"))).version
        await stub.StartStage(start("rl", GRPO))
        events = await watched(stub, "rl")
    assert (base.number, base.step, base.parent) == (1, 0, 0)
    assert (tuned.number, tuned.step, tuned.parent) == (2, 6, 1)
    assert tuned.root_hash != base.root_hash
    versions = [e.version.version for e in events if e.WhichOneof("event") == "version"]
    # The weights were published already: the stage's first version is that of its first step.
    assert [(v.number, v.step, v.parent) for v in versions][:2] == [(3, 7, 2), (4, 8, 3)]


async def test_weights_that_are_published_already_get_no_new_number(
    tmp_path: Path, model: Path, peers: SimulatedPeers
) -> None:
    async with serving(settings(tmp_path, model), peers) as stub:
        requests = [pb.PublishWeightsRequest(stage=stage) for stage in ("base", "base", "")]
        numbers = [(await stub.PublishWeights(request)).version.number for request in requests]
        assert numbers == [1, 1, 1]
        await stub.StartStage(start("rl", GRPO))
        events = await watched(stub, "rl")
        versions = [e.version.version for e in events if e.WhichOneof("event") == "version"]
        again = (await stub.PublishWeights(pb.PublishWeightsRequest(stage="rl"))).version
        assert again == versions[-1]
    # A resumed trainer is another publisher: it begins with an anchor of its own.
    async with serving(settings(tmp_path, model), peers) as stub:
        anchor = (await stub.PublishWeights(pb.PublishWeightsRequest(stage="rl"))).version
        assert anchor.number == again.number + 1
        assert anchor.root_hash == again.root_hash


async def test_starting_a_stage_again_changes_nothing(
    tmp_path: Path, model: Path, peers: SimulatedPeers
) -> None:
    peers.held_back = {f"game-run-rl-{ordinal:06d}" for ordinal in range(20)}
    async with serving(settings(tmp_path, model), peers) as stub:
        await stub.StartStage(start("rl", GRPO))
        assert (await stub.StartStage(start("rl", GRPO))).step == 0
        with pytest.raises(AlreadyExists, match="batch_groups differ"):
            await stub.StartStage(start("rl", GRPO.replace("batch_groups = 2", "batch_groups = 3")))
        with pytest.raises(FailedPrecondition, match="stage 'rl' is running"):
            await stub.StartStage(start("rl2", GRPO))
        with pytest.raises(FailedPrecondition, match="publishes its own"):
            await stub.PublishWeights(pb.PublishWeightsRequest(stage="base"))
        assert (await stub.StopStage(pb.StopStageRequest(name="rl"))).step == 0
        events = await watched(stub, "rl")
        assert events[-1].ended.state == pb.STAGE_STATE_STOPPED


async def test_a_finished_stage_is_not_run_again_unless_it_gets_more_steps(
    tmp_path: Path, model: Path, peers: SimulatedPeers
) -> None:
    async with serving(settings(tmp_path, model), peers) as stub:
        await stub.StartStage(start("rl", GRPO))
        first = await watched(stub, "rl")
        assert (await stub.StartStage(start("rl", GRPO))).step == 4
        assert await watched(stub, "rl") == first
        assert (
            await stub.StartStage(start("rl", GRPO.replace("steps = 4", "steps = 6", 1)))
        ).step == 4
        events = await watched(stub, "rl", len(first))
        assert events[-1].ended.steps == 6


async def test_a_service_that_ends_while_a_stage_runs_goes_on_where_it_was(
    tmp_path: Path, model: Path, peers: SimulatedPeers
) -> None:
    config = settings(tmp_path, model)
    recipe = GRPO.replace("steps = 4", "steps = 12", 1)
    async with serving(config, peers) as stub:
        await stub.StartStage(start("rl", recipe))
        async for event in stub.WatchStage(pb.WatchStageRequest(name="rl")):
            if event.WhichOneof("event") == "step" and event.step.step >= 3:
                break
    async with serving(config, peers) as stub:
        status = await stub.GetStatus(pb.GetStatusRequest())
        assert status.stages[0].state == pb.STAGE_STATE_STOPPED
        reached = status.stages[0].step
        assert 3 <= reached < 12
        assert kinds(await watched(stub, "rl"))[-1] == "ended"
        assert (await stub.StartStage(start("rl", recipe))).step == reached
        events = await watched(stub, "rl")
        assert kinds(events).count("ended") == 1
        assert [e.step.step for e in events if e.WhichOneof("event") == "step"] == list(
            range(1, 13)
        )
        assert f"goes on from the checkpoint of step {reached}" in [e.note for e in events]
    assert peers.known_numbers == [0, reached + 1]
    numbers = [version.number for version in peers.weight_sync.versions]
    assert numbers == sorted(set(numbers))


async def test_a_killed_service_knows_how_far_its_stage_was(
    tmp_path: Path, model: Path, peers: SimulatedPeers
) -> None:
    config = settings(tmp_path, model)
    async with serving(config, peers) as stub:
        await stub.StartStage(start("rl", GRPO))
        await watched(stub, "rl")
    # As a kill leaves it: the last thing written down is that the stage began.
    file = tmp_path / "run" / "run.json"
    record = json.loads(file.read_text())
    record["stages"][0] |= {"state": "running", "step": 0}
    file.write_text(json.dumps(record))
    async with serving(config, peers) as stub:
        (stage,) = (await stub.GetStatus(pb.GetStatusRequest())).stages
        assert (stage.state, stage.step) == (pb.STAGE_STATE_STOPPED, 4)


async def test_recipes_and_names_that_are_wrong_are_refused_with_the_reason(
    tmp_path: Path, model: Path, peers: SimulatedPeers
) -> None:
    async with serving(settings(tmp_path, model), peers) as stub:
        for recipe, words in [
            (GRPO + "\n[loss]\ncliplow = 0.1", r"recipe: unknown key 'loss.cliplow'.*clip_low"),
            (GRPO.replace("steps = 4", "steps = 0", 1), "steps"),
            ("steps = ", "not valid TOML"),
            (GRPO.replace('task_set = "game"', ""), "give either task_set or tasks"),
        ]:
            with pytest.raises(InvalidArgument, match=words):
                await stub.StartStage(start("rl", recipe))
        for name in ("", "base", "a/b", "../x", "x" * 65):
            with pytest.raises(InvalidArgument, match="cannot be named"):
                await stub.StartStage(start(name, GRPO))
        with pytest.raises(InvalidArgument, match="kind"):
            await stub.StartStage(start("rl", GRPO, pb.STAGE_KIND_UNSPECIFIED))
        with pytest.raises(NotFound, match="no task set 'other'"):
            await stub.StartStage(start("rl", GRPO.replace('"game"', '"other"')))
        with pytest.raises(NotFound, match="no stage is named 'sft'"):
            await stub.StartStage(start("rl", 'start_from = "sft"\n' + GRPO))
        with pytest.raises(NotFound):
            await stub.StopStage(pb.StopStageRequest(name="rl"))
        with pytest.raises(NotFound):
            await stub.PublishWeights(pb.PublishWeightsRequest(stage="sft"))
        assert not (await stub.GetStatus(pb.GetStatusRequest())).stages


async def test_a_peer_that_is_away_can_be_tried_again(
    tmp_path: Path, model: Path, peers: SimulatedPeers
) -> None:
    peers.unreachable = True
    async with serving(settings(tmp_path, model), peers) as stub:
        with pytest.raises(Unavailable) as refusal:
            await stub.StartStage(start("rl", GRPO))
        assert refusal.value.retryable
        peers.unreachable = False
        await stub.StartStage(start("rl", GRPO))
        assert kinds(await watched(stub, "rl"))[-1] == "ended"


async def test_a_stage_that_fails_says_why_and_can_be_started_again(
    tmp_path: Path, model: Path, peers: SimulatedPeers, sft: str
) -> None:
    traces = tmp_path / "traces.jsonl"
    good = traces.read_text()
    traces.write_text("{}\n")
    async with serving(settings(tmp_path, model), peers) as stub:
        await stub.StartStage(start("sft", sft, pb.STAGE_KIND_SFT))
        ended = (await watched(stub, "sft"))[-1].ended
        assert ended.state == pb.STAGE_STATE_FAILED
        assert "traces.jsonl:1: expected schema_version" in ended.error
        traces.write_text(good)
        await stub.StartStage(start("sft", sft, pb.STAGE_KIND_SFT))
        events = await watched(stub, "sft")
        assert events[-1].ended.state == pb.STAGE_STATE_FINISHED
        assert kinds(events).count("ended") == 1


async def test_on_a_full_disk_watchers_still_hear_the_end(
    tmp_path: Path, model: Path, peers: SimulatedPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers.held_back = {f"game-run-rl-{ordinal:06d}" for ordinal in range(20)}
    async with serving(settings(tmp_path, model), peers) as stub:
        await stub.StartStage(start("rl", GRPO))

        def full(*_: Any, **__: Any) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "open", full)
        monkeypatch.setattr(Path, "mkdir", full)
        await stub.StopStage(pb.StopStageRequest(name="rl"))
        ended = (await watched(stub, "rl"))[-1].ended
        assert ended.state == pb.STAGE_STATE_FAILED
        assert "no space" in ended.error
        status = await stub.GetStatus(pb.GetStatusRequest())
        assert status.stages[0].state == pb.STAGE_STATE_FAILED
        monkeypatch.undo()
        peers.held_back.clear()
        await stub.StartStage(start("rl", GRPO))
        assert (await watched(stub, "rl"))[-1].ended.state == pb.STAGE_STATE_FINISHED


async def test_base_weights_can_be_published_while_sft_runs(
    tmp_path: Path, model: Path, peers: SimulatedPeers, sft: str
) -> None:
    async with serving(settings(tmp_path, model), peers) as stub:
        recipe = sft.replace("steps = 6", "steps = 400")
        await stub.StartStage(start("sft", recipe, pb.STAGE_KIND_SFT))
        version = (await stub.PublishWeights(pb.PublishWeightsRequest(stage="base"))).version
        assert version.step == 0
        with pytest.raises(FailedPrecondition, match="is training the weights held now"):
            await stub.PublishWeights(pb.PublishWeightsRequest())
        await stub.StopStage(pb.StopStageRequest(name="sft"))
        tuned = (await stub.PublishWeights(pb.PublishWeightsRequest())).version
        assert tuned.step > 0
        held = {n: np.asarray(t).tobytes() for n, t in peers.weight_sync.weights.items()}
        again = (await stub.PublishWeights(pb.PublishWeightsRequest(stage="base"))).version
        assert again.root_hash == version.root_hash
        assert held != {n: np.asarray(t).tobytes() for n, t in peers.weight_sync.weights.items()}


async def test_a_stage_may_start_from_an_earlier_one(
    tmp_path: Path, model: Path, peers: SimulatedPeers, sft: str
) -> None:
    async with serving(settings(tmp_path, model), peers) as stub:
        await stub.StartStage(start("sft", sft, pb.STAGE_KIND_SFT))
        await watched(stub, "sft")
        await stub.StartStage(start("rl", GRPO))
        await watched(stub, "rl")
        more = 'start_from = "sft"\n' + sft
        await stub.StartStage(start("sft-more", more, pb.STAGE_KIND_SFT))
        await watched(stub, "sft-more")
        status = await stub.GetStatus(pb.GetStatusRequest())
        version = (await stub.PublishWeights(pb.PublishWeightsRequest())).version
    assert [stage.name for stage in status.stages] == ["sft", "rl", "sft-more"]
    assert version.step == 12


async def test_heartbeats_fill_the_silence(
    tmp_path: Path, model: Path, peers: SimulatedPeers
) -> None:
    peers.held_back = {f"game-run-rl-{ordinal:06d}" for ordinal in range(20)}
    async with serving(settings(tmp_path, model), peers) as stub:
        await stub.StartStage(start("rl", GRPO))
        async with asyncio.timeout(10):
            async for event in stub.WatchStage(pb.WatchStageRequest(name="rl")):
                if event.WhichOneof("event") == "heartbeat":
                    break


async def test_a_damaged_checkpoint_stops_the_service_from_starting(
    tmp_path: Path, model: Path, peers: SimulatedPeers, sft: str
) -> None:
    config = settings(tmp_path, model)
    async with serving(config, peers) as stub:
        await stub.StartStage(start("sft", sft, pb.STAGE_KIND_SFT))
        await watched(stub, "sft")
    newest = max((tmp_path / "run/stages/sft/checkpoints").iterdir())
    os.truncate(newest / "model.safetensors", 100)
    with pytest.raises(CheckpointInvalid, match=r"model\.safetensors: expected \d+ bytes, found"):
        await TrainerRun(config, peers, make_backend).open()
    assert CheckpointInvalid.reason is Reason.CHECKPOINT_INVALID


async def test_a_run_folder_is_of_one_run(
    tmp_path: Path, model: Path, peers: SimulatedPeers
) -> None:
    TrainerRun(settings(tmp_path, model), peers, make_backend)
    with pytest.raises(RunConflict, match="resume = true"):
        TrainerRun(settings(tmp_path, model, resume=False), peers, make_backend)
    with pytest.raises(RunConflict, match="holds run 'game-run', not 'other'"):
        TrainerRun(settings(tmp_path, model, run="other"), peers, make_backend)
