"""A GRPO stage over simulated engines, through any number of a trainer's lives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from grpo_trainer.backends.torch import TorchBackend
from grpo_trainer.checkpoint import CheckpointStore
from grpo_trainer.config import GrpoConfig
from grpo_trainer.events import Event, EventKind, EventLog
from grpo_trainer.loop import GrpoStage
from grpo_trainer.stage import PolicyState, StageContext, StageState
from grpo_trainer.testing.game import TASKS, TokenGame
from grpo_trainer.testing.simulated import (
    Play,
    SimulatedEngines,
    SimulatedLedger,
    SimulatedWeightSync,
)

GAME_RECIPE: Mapping[str, Any] = {
    "tasks": list(TASKS),
    "steps": 6,
    "batch_groups": 2,
    "group_size": 4,
    "minibatches": 2,
    "admission": {"staleness_bound": 1, "pace_headroom": 0},
    "optimizer": {"learning_rate": 0.01, "warmup_steps": 0},
    "checkpoint": {"every_steps": 2, "keep": 3},
}


def game_recipe(**changes: Any) -> GrpoConfig:
    """Return a recipe for the token game, without anything that depends on a clock."""
    return GrpoConfig.model_validate({**GAME_RECIPE, **changes})


async def quietly(work: Callable[[], Any]) -> Any:
    """Let every other task come to rest, then run the work in place of a thread."""
    for _ in range(200):
        await asyncio.sleep(0)
    return work()


@dataclass(slots=True)
class World:
    """What outlives a trainer: engines' ledgers, weight-sync, the run folder.

    Attributes:
        folder: Of the run.
        model: The model folder.
        play: Plays groups.
    """

    folder: Path
    model: Path
    play: Play | None = None
    weight_sync: SimulatedWeightSync = field(default_factory=SimulatedWeightSync)
    ledgers: dict[str, SimulatedLedger] = field(default_factory=lambda: {"e1": SimulatedLedger()})

    def __post_init__(self) -> None:
        if self.play is None:
            self.play = TokenGame(self.model).play

    def life(self, config: GrpoConfig, **engine_settings: Any) -> Life:
        """Begin a life of the trainer, from the newest checkpoint if there is one."""
        assert self.play is not None
        engines = SimulatedEngines(self.weight_sync, self.play, self.ledgers, **engine_settings)
        checkpoints = CheckpointStore(
            self.folder / "checkpoints", stage="rl", keep=config.checkpoint.keep
        )
        backend = TorchBackend(self.model)
        policy, step, state = PolicyState(), 0, None
        if checkpoints.newest() is None:
            backend.start_optimizer(config.optimizer)
            if config.loss.kl_coefficient:
                backend.keep_reference()
        else:
            checkpoint = checkpoints.read_newest()
            backend.load(checkpoint.folder, optimizer=config.optimizer)
            policy = PolicyState.from_json(checkpoint.state["policy"])
            step, state = checkpoint.step, checkpoint.state["stage"]
        self.folder.mkdir(exist_ok=True, parents=True)
        context = StageContext(
            run="run",
            name="rl",
            events=EventLog(self.folder / "events.jsonl"),
            checkpoints=checkpoints,
            policy=policy,
            compute=quietly,
            clock=lambda: 0.0,
        )
        stage = GrpoStage(
            context,
            backend,
            config,
            source=engines,
            publisher=self.weight_sync.acquire(),
            tasks=config.tasks,
            step=step,
            state=json.loads(json.dumps(state)),
        )
        return Life(stage, context, backend, engines)


@dataclass(slots=True)
class Life:
    """One life of a trainer."""

    stage: GrpoStage
    context: StageContext
    backend: TorchBackend
    engines: SimulatedEngines

    async def run(self, *, stop_after: int = 0) -> StageState:
        """Run the stage; with `stop_after`, stop it once that step is done."""
        async with asyncio.TaskGroup() as tasks:
            stopping = tasks.create_task(self._stop_after(stop_after))
            state = await self.stage.run()
            stopping.cancel()
        return state

    async def run_until_killed(self, *, events: int) -> bool:
        """Run until so many events were logged, then end at once; whether it was killed."""
        stage = asyncio.ensure_future(self.stage.run())
        reached = asyncio.ensure_future(self._reached(events))
        await asyncio.wait({stage, reached}, return_when=asyncio.FIRST_COMPLETED)
        finished = stage.done()
        stage.cancel()
        reached.cancel()
        await asyncio.wait({stage, reached})
        if finished:
            stage.result()
        return not finished

    def steps(self) -> list[Event]:
        """Return the events of optimizer steps."""
        return [event for event in self.context.events.events if event.kind is EventKind.STEP]

    def weights(self) -> dict[str, bytes]:
        """Return the weights held, as bytes."""
        held = self.backend.weights()
        return {name: np.asarray(tensor).tobytes() for name, tensor in held.items()}

    async def _reached(self, events: int) -> None:
        following = self.context.events.follow(len(self.context.events.events))
        for _ in range(events):
            await anext(following)

    async def _stop_after(self, step: int) -> None:
        async for event in self.context.events.follow(len(self.context.events.events)):
            if step and event.kind is EventKind.STEP and event.data["step"] >= step:
                self.context.stop.set()
