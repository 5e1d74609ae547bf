"""What a run folder knows of its stages, kept in one small file that is replaced whole."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weight_sync.core.manifest import PolicyVersion

from grpo_trainer.checkpoint import CheckpointStore, step_of
from grpo_trainer.config import NAME_PATTERN
from grpo_trainer.errors import RecipeError, RunConflict
from grpo_trainer.stage import StageKind, StageState

FORMAT = 1
RUN_FILE = "run.json"
BASE = "base"
"""Stands for the model that the run began with, where a stage's name is expected."""


def check_name(name: str) -> None:
    """Refuse a name that a new stage may not have.

    Raises:
        RecipeError: Says what a name looks like.
    """
    if name == BASE or not re.fullmatch(NAME_PATTERN, name):
        raise RecipeError(
            f"a stage cannot be named {name!r}: expected 1 to 64 letters, digits, '.', '_' or '-', "
            f"and not {BASE!r}, which stands for the model that the run began with"
        )


@dataclass(frozen=True, slots=True)
class StageRecord:
    """What is known of a stage between its lives.

    Attributes:
        name: Unique in the run.
        kind: What it does.
        recipe_toml: As it was started last.
        state: How far it is.
        step: Steps done.
        steps_total: Steps of the whole stage.
        error: Why it failed.
    """

    name: str
    kind: StageKind
    recipe_toml: str
    state: StageState
    step: int = 0
    steps_total: int = 0
    error: str = ""


def finished_by(record: StageRecord, steps: int) -> bool:
    """Say whether a stage is done even if it is now to have so many steps."""
    return record.state is StageState.FINISHED and record.step >= steps


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Where a run is.

    Attributes:
        run: Its name.
        stages: In the order in which they were last started.
        incarnation: Of its publisher; 0 while none was needed.
        policy: The version published last by this process.
        groups_in_flight: At the engines, for the running stage.
        groups_ready: Waiting for a step of it.
        staleness_bound: Of it.
    """

    run: str
    stages: tuple[StageRecord, ...]
    incarnation: int = 0
    policy: PolicyVersion | None = None
    groups_in_flight: int = 0
    groups_ready: int = 0
    staleness_bound: int = 0


class RunRegistry:
    """Stages of a run, in the order in which they were last started.

    Args:
        folder: Of the run.
        run: Its name.
        resume: Whether a run that is there already may be gone on with.

    Raises:
        RunConflict: The folder holds a run that may not be gone on with, or another one.
    """

    def __init__(self, folder: Path, *, run: str, resume: bool) -> None:
        self._folder = folder
        self._run = run
        self._stages: dict[str, StageRecord] = {}
        file = folder / RUN_FILE
        if file.is_file():
            self._read(file, resume=resume)
        else:
            folder.mkdir(parents=True, exist_ok=True)
        self._write()

    @property
    def stages(self) -> tuple[StageRecord, ...]:
        """All stages, the one started last at the end."""
        return tuple(self._stages.values())

    def find(self, name: str) -> StageRecord | None:
        """Return a stage by name."""
        return self._stages.get(name)

    def put(self, record: StageRecord, *, started: bool = False) -> None:
        """Write a stage down; one that is started moves to the end.

        It is known to this process even if it cannot be written.
        """
        if started:
            self._stages.pop(record.name, None)
        self._stages[record.name] = record
        self._write()

    def stage_folder(self, name: str) -> Path:
        """Return the folder of a stage, made if missing."""
        folder = self._folder / "stages" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def checkpoints(self, name: str, *, keep: int = 1) -> CheckpointStore:
        """Return the checkpoints of a stage."""
        return CheckpointStore(self.stage_folder(name) / "checkpoints", stage=name, keep=keep)

    def held(self) -> str:
        """Return the stage whose newest checkpoint is the weights held now, or `BASE`."""
        for record in reversed(self.stages):
            if self.checkpoints(record.name).newest() is not None:
                return record.name
        return BASE

    def _read(self, file: Path, *, resume: bool) -> None:
        try:
            value: dict[str, Any] = json.loads(file.read_bytes())
            run, found_format = value["run"], value["format"]
            stages = value["stages"]
        except (ValueError, KeyError, TypeError) as error:
            raise RunConflict(f"{file}: not the record of a run: {error!r}") from error
        if found_format != FORMAT:
            raise RunConflict(f"{file}: expected format {FORMAT}, found {found_format!r}")
        if not resume:
            raise RunConflict(
                f"{self._folder} holds run {run!r} already; set resume = true to go on with it, or "
                "name another run_dir"
            )
        if run != self._run:
            raise RunConflict(
                f"{self._folder} holds run {run!r}, not {self._run!r}; name the run or another "
                "run_dir"
            )
        for row in stages:
            kind, state = StageKind(row.pop("kind")), StageState(row.pop("state"))
            record = StageRecord(kind=kind, state=state, **row)
            if not state.ended:
                # The process ended while it ran.
                newest = self.checkpoints(record.name).newest()
                step = 0 if newest is None else step_of(newest)
                record = replace(record, state=StageState.STOPPED, step=step)
            self._stages[record.name] = record

    def _write(self) -> None:
        rows = [
            {
                "name": record.name,
                "kind": record.kind.value,
                "recipe_toml": record.recipe_toml,
                "state": record.state.value,
                "step": record.step,
                "steps_total": record.steps_total,
                "error": record.error,
            }
            for record in self._stages.values()
        ]
        value = {"format": FORMAT, "run": self._run, "stages": rows}
        file = self._folder / RUN_FILE
        temporary = file.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as stream:
            json.dump(value, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
