"""The stage over real streams: R's client, a fake engine, restarts in between."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
from grpo_trainer.backends.torch import TorchBackend
from grpo_trainer.checkpoint import CheckpointStore
from grpo_trainer.config import GrpoConfig
from grpo_trainer.events import EventKind, EventLog
from grpo_trainer.loop import GrpoStage
from grpo_trainer.rollouts import RolloutPool
from grpo_trainer.stage import ComputeThread, PolicyState, StageContext, StageState
from grpo_trainer.testing.game import TokenGame
from grpo_trainer.testing.lives import game_recipe
from grpo_trainer.testing.models import DENSE, write_model
from grpo_trainer.testing.rollout_service import FakeLedger, FakeRolloutService
from grpo_trainer.testing.simulated import SimulatedWeightSync
from rollout_engine.client import ConsumerConfig
from rollout_engine.types import Assignment, FinishedGroup
from service_kit.channel import ChannelConfig, open_channel
from service_kit.errors import FailedPrecondition, Reason, leaf_errors
from service_kit.server import Server, ServerConfig, Service
from tailrace.rollout.v1 import rollout_service_pb2 as rollout_pb
from tailrace.rollout.v1 import rollout_service_pb2_grpc as rollout_grpc

QUICK = ConsumerConfig(heartbeat_s=0.2, idle_s=2, reconnect_initial_s=0.02, reconnect_max_s=0.1)


class Engine:
    """An engine that can be killed and started again on its port."""

    def __init__(self, model: Path, weight_sync: SimulatedWeightSync) -> None:
        self._game = TokenGame(model)
        self._weight_sync = weight_sync
        self._server: Server | None = None
        self._bind = "127.0.0.1:0"
        self.ledger = FakeLedger()

    async def start(self) -> None:
        service = FakeRolloutService(self._play, self.ledger)
        register = partial(rollout_grpc.add_RolloutServiceServicer_to_server, service)
        entry = Service("tailrace.rollout.v1.RolloutService", register)
        self._server = Server(ServerConfig(bind=self._bind, drain_grace_s=0), [entry])
        await self._server.start()
        self._bind = self._server.address

    async def kill(self) -> None:
        assert self._server is not None
        await self._server.drain()

    def channel(self) -> grpc.aio.Channel:
        return open_channel(
            ChannelConfig(target=self._bind, max_reconnect_backoff_s=0.1),
            contracts=(rollout_pb.DESCRIPTOR,),
        )

    def _play(self, assignment: Assignment) -> FinishedGroup:
        service = self._weight_sync
        return self._game.play(assignment, service.weights, service.number)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", DENSE, scale=0.02)


@asynccontextmanager
async def stage_over(
    engines: dict[str, Engine], model: Path, folder: Path, config: GrpoConfig
) -> AsyncIterator[tuple[GrpoStage, StageContext]]:
    weight_sync = next(iter(engines.values()))._weight_sync
    publisher = weight_sync.acquire()
    checkpoints = CheckpointStore(folder / "checkpoints", stage="rl", keep=2)
    backend = TorchBackend(model)
    policy, step, state = PolicyState(), 0, None
    if checkpoints.newest() is None:
        backend.start_optimizer(config.optimizer)
    else:
        saved = checkpoints.read_newest()
        backend.load(saved.folder, optimizer=config.optimizer)
        policy = PolicyState.from_json(saved.state["policy"])
        step, state = saved.step, saved.state["stage"]
    channels = {name: engine.channel() for name, engine in engines.items()}
    pool = RolloutPool(
        channels,
        consumer_id="run-rl",
        incarnation=publisher.incarnation,
        cursors={} if state is None else state["flow"]["book"]["cursors"],
        config=QUICK,
    )
    compute = ComputeThread()
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240
    events = EventLog(folder / "events.jsonl")
    context = StageContext("run", "rl", events, checkpoints, policy, compute)
    stage = GrpoStage(
        context,
        backend,
        config,
        source=pool,
        publisher=publisher,
        tasks=config.tasks,
        step=step,
        state=state,
    )
    try:
        yield stage, context
    finally:
        compute.close()
        for channel in channels.values():
            await channel.close()


async def test_a_stage_trains_over_the_wire_and_every_group_is_committed(
    model: Path, tmp_path: Path
) -> None:
    engine = Engine(model, SimulatedWeightSync())
    await engine.start()
    async with stage_over({"e1": engine}, model, tmp_path / "run", game_recipe()) as (stage, _):
        assert await asyncio.wait_for(stage.run(), 60) is StageState.FINISHED
    decisions = engine.ledger.decisions()
    assert decisions["TRAINED"] == 12
    assert "UNSPECIFIED" not in decisions
    await engine.kill()


async def test_an_engine_killed_again_and_again_loses_and_repeats_nothing(
    model: Path, tmp_path: Path
) -> None:
    engine = Engine(model, SimulatedWeightSync())
    await engine.start()
    async with stage_over({"e1": engine}, model, tmp_path / "run", game_recipe(steps=8)) as (
        stage,
        context,
    ):

        async def kills() -> None:
            rng = random.Random(0)
            async for event in context.events.follow(0):
                if event.kind is EventKind.STEP and event.data["step"] in (2, 4, 6):
                    await engine.kill()
                    await asyncio.sleep(rng.random() / 10)
                    await engine.start()

        killing = asyncio.ensure_future(kills())
        assert await asyncio.wait_for(stage.run(), 60) is StageState.FINISHED
        killing.cancel()
    decisions = engine.ledger.decisions()
    assert decisions["TRAINED"] == 16
    assert "UNSPECIFIED" not in decisions
    assert max(engine.ledger.deliveries.values()) >= 1
    await engine.kill()


async def test_a_trainer_killed_and_resumed_over_the_wire_trains_each_group_once(
    model: Path, tmp_path: Path
) -> None:
    engine = Engine(model, SimulatedWeightSync())
    await engine.start()
    config = game_recipe(steps=8)
    for kill_after in (3, 5, 0):
        async with stage_over({"e1": engine}, model, tmp_path / "run", config) as (stage, context):
            running = asyncio.ensure_future(stage.run())
            if kill_after:
                async for event in context.events.follow(0):
                    if event.kind is EventKind.STEP and event.data["step"] >= kill_after:
                        break
                running.cancel()
                await asyncio.wait({running})
            else:
                assert await asyncio.wait_for(running, 60) is StageState.FINISHED
    assert engine.ledger.incarnation == 3
    assert engine.ledger.decisions()["TRAINED"] == 16
    trained = [
        row.assignment.key.group_id
        for row in engine.ledger.rows.values()
        if row.decision == rollout_pb.DECISION_TRAINED
    ]
    assert len(trained) == len(set(trained))
    await engine.kill()


async def test_two_engines_share_the_work(model: Path, tmp_path: Path) -> None:
    weight_sync = SimulatedWeightSync()
    engines = {name: Engine(model, weight_sync) for name in ("e1", "e2")}
    for engine in engines.values():
        await engine.start()
    async with stage_over(engines, model, tmp_path / "run", game_recipe()) as (stage, _):
        assert await asyncio.wait_for(stage.run(), 60) is StageState.FINISHED
    shares = [len(engine.ledger.rows) for engine in engines.values()]
    assert min(shares) > 0
    for engine in engines.values():
        await engine.kill()


async def test_an_engine_that_refuses_the_consumer_ends_the_stage_with_its_reason(
    model: Path, tmp_path: Path
) -> None:
    class Fencing(FakeRolloutService):
        async def RunGroups(
            self, request_iterator: object, context: object
        ) -> AsyncIterator[rollout_pb.RunGroupsResponse]:
            if self.ledger.incarnation < 9:
                raise FailedPrecondition("incarnation 9 has taken over", reason=Reason.FENCED)
            yield rollout_pb.RunGroupsResponse()

    engine = Engine(model, SimulatedWeightSync())
    register = partial(rollout_grpc.add_RolloutServiceServicer_to_server, Fencing(engine._play))
    entry = Service("tailrace.rollout.v1.RolloutService", register)
    async with Server(ServerConfig(), [entry]) as server:
        engine._bind = server.address
        async with stage_over({"e1": engine}, model, tmp_path / "run", game_recipe()) as (stage, _):
            with pytest.raises(ExceptionGroup) as failure:
                await asyncio.wait_for(stage.run(), 30)
    assert any("incarnation 9" in str(leaf) for leaf in leaf_errors(failure.value))
