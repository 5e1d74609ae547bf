"""What every stage has: a name, a folder, events, checkpoints, a way to stop."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from grpo_trainer.checkpoint import CheckpointStore
from grpo_trainer.core.staleness import Lineage, LineageVersion
from grpo_trainer.events import EventKind, EventLog

T = TypeVar("T")

KEEP_STEPS = 1000
"""How many steps of the lineage a checkpoint remembers; far more than any staleness bound."""


class StageKind(enum.StrEnum):
    """What a stage does."""

    SFT = "sft"
    GRPO = "grpo"


class StageState(enum.StrEnum):
    """How far a stage is."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether it does not run."""
        return self is not StageState.RUNNING


class RunningStage(Protocol):
    """A stage that can be run once."""

    @property
    def step(self) -> int:
        """Steps done."""
        ...

    @property
    def steps_total(self) -> int:
        """Steps of the whole stage."""
        ...

    async def run(self) -> StageState:
        """Train to the end, or until stopped; the last thing written is a checkpoint."""
        ...


class ComputeThread:
    """The one thread in which a back-end is called, so that its calls never overlap."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="compute")

    async def __call__(self, work: Callable[[], T]) -> T:
        """Run `work` there. A cancellation waits for it: half an update must not be left behind."""
        running = asyncio.get_running_loop().run_in_executor(self._executor, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})
            raise

    def close(self) -> None:
        """End the thread once its work is done."""
        self._executor.shutdown(wait=False, cancel_futures=True)


Compute = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs blocking work of the back-end; `ComputeThread`, or something simpler in tests."""


@dataclass(slots=True)
class PolicyState:
    """The weights held now, and where they come from. Stages hand it on to each other.

    Attributes:
        step: Optimizer steps that led to them, over all stages.
        version: Number under which they are published; 0 if they are not.
        known_number: Highest version number seen.
        lineage: Published versions that they descend from.
    """

    step: int = 0
    version: int = 0
    known_number: int = 0
    lineage: Lineage = field(default_factory=Lineage)

    def stepped(self) -> None:
        """Note an optimizer step: the weights held now are published under no number."""
        self.step += 1
        self.version = 0

    def published(self, number: int) -> None:
        """Note the number under which the weights held now were published."""
        self.version = number
        self.known_number = max(self.known_number, number)
        self.lineage.publish(number, self.step)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values. Versions that are too old to matter are left out."""
        kept = self.lineage.trimmed(keep_steps=KEEP_STEPS).versions
        return {
            "step": self.step,
            "version": self.version,
            "known_number": self.known_number,
            "versions": [[version.number, version.step] for version in kept],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PolicyState:
        """Read what `to_json` returned."""
        versions = (LineageVersion(number, step) for number, step in value["versions"])
        return cls(value["step"], value["version"], value["known_number"], Lineage(versions))


@dataclass(slots=True)
class StageContext:
    """A stage's surroundings.

    Attributes:
        run: Name of the run.
        name: Of the stage.
        events: Its log.
        checkpoints: Its checkpoints.
        policy: The weights held now; the stage moves them on.
        compute: Where the back-end is called.
        stop: Set to end the stage after the step at hand.
        clock: Monotonic seconds.
    """

    run: str
    name: str
    events: EventLog
    checkpoints: CheckpointStore
    policy: PolicyState
    compute: Compute
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    clock: Callable[[], float] = time.monotonic

    async def note(self, text: str) -> None:
        """Tell the watchers something."""
        await self.events.append(EventKind.NOTE, {"text": text})

    async def save(self, step: int, state: dict[str, Any], save: Callable[[Path], None]) -> Path:
        """Write a checkpoint in the compute thread."""
        whole = {"policy": self.policy.to_json(), "stage": dict(state)}
        path: Path = await self.compute(lambda: self.checkpoints.write(step, whole, save))
        await self.events.append(EventKind.CHECKPOINT, {"step": step, "path": str(path)})
        return path
