"""A training run: its weights, its stages one after another, its place at weight-sync."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from service_kit.telemetry import parent_context, tracer
from weight_sync.core.manifest import PolicyVersion

from grpo_trainer.backends.base import TrainerBackend
from grpo_trainer.builders import (
    ActiveStage,
    build_grpo,
    build_sft,
    take_up_weights,
)
from grpo_trainer.checkpoint import step_of
from grpo_trainer.config import GrpoConfig, TrainerConfig
from grpo_trainer.errors import (
    StageConflict,
    TrainerError,
    UnknownStage,
    explained,
    is_expected,
)
from grpo_trainer.events import Event, EventKind, EventLog
from grpo_trainer.held import HeldWeights
from grpo_trainer.peers import Peers
from grpo_trainer.recipes import StageRecipe, check_same_recipe, parse_recipe
from grpo_trainer.registry import (
    BASE,
    RunRegistry,
    RunStatus,
    StageRecord,
    check_name,
    finished_by,
)
from grpo_trainer.stage import (
    ComputeThread,
    PolicyState,
    StageContext,
    StageKind,
    StageState,
)
from grpo_trainer.telemetry import NAME
from grpo_trainer.weights import RecordedPublisher, WeightsPublisher

logger = logging.getLogger(__name__)

STOP_GRACE_S = 60.0
"""Longest wait, when the service ends, for the stage at hand to write its checkpoint."""


class TrainerRun:
    """One run, over its folder. Stages run one at a time.

    Args:
        config: Of the service.
        peers: The other services.
        make_backend: Makes what computes; called in the compute thread.
    """

    def __init__(
        self,
        config: TrainerConfig,
        peers: Peers,
        make_backend: Callable[[TrainerConfig], TrainerBackend],
    ) -> None:
        self._config = config
        self._peers = peers
        self._make_backend = make_backend
        self._compute = ComputeThread()
        self._registry = RunRegistry(config.run_dir, run=config.run, resume=config.resume)
        self._lock = asyncio.Lock()
        self._tasks: asyncio.TaskGroup | None = None
        self._active: ActiveStage | None = None
        self._publisher: WeightsPublisher | None = None
        self._newest: PolicyVersion | None = None
        self._logs: dict[str, EventLog] = {}
        self._held: HeldWeights

    async def open(self) -> None:
        """Load the weights that the run folder holds.

        Raises:
            ModelError, CheckpointInvalid: The operator has to mend something.
        """
        config = self._config
        backend = await self._compute(lambda: self._make_backend(config))
        self._held = HeldWeights(backend, self._registry, self._compute, config.model)
        await self._held.hold(self._registry.held())
        for record in self._registry.stages:
            log = self._log(record.name)
            if log.events and log.events[-1].kind is not EventKind.ENDED:
                await self._append_end(replace(record, error="the trainer's process ended"))

    async def serve(self) -> None:
        """Own the stages' tasks until cancelled; then let the stage at hand end well."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                try:
                    await asyncio.Event().wait()
                finally:
                    await self.stop_active()
        finally:
            self._tasks = None
            self._compute.close()

    async def start_stage(
        self, name: str, kind: StageKind, recipe_toml: str, traceparent: str = ""
    ) -> int:
        """Start a stage, or go on with one where its checkpoint left it.

        Returns:
            The step it goes on from; of a finished stage its last.

        Raises:
            RecipeError: The recipe or the name is not valid.
            StageDiffers: The name is taken by a stage of another kind or recipe.
            StageConflict: Another stage is running.
            ServiceError: A peer that the stage needs cannot be reached.
        """
        recipe = parse_recipe(kind, recipe_toml)
        check_name(name)
        async with self._lock:
            record = self._registry.find(name)
            if record is not None:
                check_same_recipe(name, parse_recipe(record.kind, record.recipe_toml), recipe)
            if self._active is not None and self._active.record.name == name:
                return self._with_progress(self._active.record).step
            if self._active is not None:
                raise StageConflict(
                    f"stage {self._active.record.name!r} is running; stop it, or wait for its end, "
                    f"before starting {name!r}"
                )
            if record is not None and finished_by(record, recipe.steps):
                return record.step
            publisher = await self._publisher_for(recipe)
            return await self._launch(name, kind, recipe, recipe_toml, publisher, traceparent)

    async def stop_stage(self, name: str) -> int:
        """Let a stage finish its step and write a checkpoint.

        Returns:
            Its step.

        Raises:
            UnknownStage: There is none of this name.
        """
        active = self._active
        if active is not None and active.record.name == name:
            active.context.stop.set()
            await active.ended.wait()
        return self._find(name).step

    async def publish_weights(self, stage: str) -> PolicyVersion:
        """Publish weights without training, unless this process did so and nothing since.

        Args:
            stage: Whose newest checkpoint; `base` for the model that the run began with; empty for
                the weights held now.

        Raises:
            StageConflict: A stage is running that publishes itself, or whose weights change.
            UnknownStage: There is no such stage.
            CheckpointInvalid: It has no checkpoint, or one that is not whole.
            ServiceError: weight-sync refuses, or cannot be reached.
        """
        async with self._lock:
            self._check_publishable(stage)
            name = stage or self._registry.held()
            publisher = await self._acquire()
            held = self._active is None and name == self._registry.held()
            if held:
                await self._held.hold(name)
                policy = self._held.policy
                if self._newest is not None and self._newest.number == policy.version:
                    return self._newest
                tensors = await self._held.tensors()
            else:
                tensors, policy = await self._held.tensors_of(name)
            newest = policy.lineage.newest
            version = await publisher.publish(
                tensors, step=policy.step, parent=0 if newest is None else newest.number
            )
            if held:
                policy.published(version.number)
            self._published(version)
            return version

    def status(self) -> RunStatus:
        """Say where the run is."""
        active = self._active
        stage = None if active is None else active.stage
        return RunStatus(
            run=self._config.run,
            stages=tuple(self._with_progress(record) for record in self._registry.stages),
            incarnation=0 if self._publisher is None else self._publisher.incarnation,
            policy=self._newest,
            groups_in_flight=getattr(stage, "groups_in_flight", 0),
            groups_ready=getattr(stage, "groups_ready", 0),
            staleness_bound=getattr(stage, "staleness_bound", 0),
        )

    async def watch(self, name: str, cursor: int) -> AsyncIterator[Event]:
        """Yield a stage's events after a cursor; ends with the one that tells of its end.

        Raises:
            UnknownStage: There is none of this name.
        """
        self._find(name)
        log = self._log(name)
        if self._is_over(log, name) and cursor >= len(log.events):
            yield log.events[-1]
            return
        async for event in log.follow(cursor):
            last = event.cursor == len(log.events) and self._is_over(log, name)
            # An end that the stage has outlived since is of no interest.
            if event.kind is not EventKind.ENDED or last:
                yield event
            if last:
                return

    async def _publisher_for(self, recipe: StageRecipe) -> WeightsPublisher | None:
        """Get what a stage needs of the peers, while the caller can still be told to try again."""
        if recipe.start_from not in ("", BASE):
            self._find(recipe.start_from)
        if not isinstance(recipe, GrpoConfig):
            return None
        if recipe.task_set:
            await self._peers.list_tasks(recipe.task_set, limit=1)
        return await self._acquire()

    async def _launch(
        self,
        name: str,
        kind: StageKind,
        recipe: StageRecipe,
        recipe_toml: str,
        publisher: WeightsPublisher | None,
        traceparent: str,
    ) -> int:
        if self._tasks is None:
            raise StageConflict("the service is ending; start the stage when it runs again")
        checkpoints = self._registry.checkpoints(name, keep=recipe.checkpoint.keep)
        newest = checkpoints.newest()
        step = 0 if newest is None else step_of(newest)
        record = StageRecord(
            name, kind, recipe_toml, StageState.RUNNING, step=step, steps_total=recipe.steps
        )
        context = StageContext(
            run=self._config.run,
            name=name,
            events=self._log(name),
            checkpoints=checkpoints,
            policy=PolicyState(),
            compute=self._compute,
        )
        self._active = ActiveStage(record, recipe, context)
        self._registry.put(record, started=True)
        self._tasks.create_task(self._run_stage(self._active, publisher, traceparent))
        return step

    async def _run_stage(
        self, active: ActiveStage, publisher: WeightsPublisher | None, traceparent: str
    ) -> None:
        """Run a stage, and write down how it ended whatever happens."""
        state, error = StageState.FAILED, ""
        try:
            with tracer(NAME).start_as_current_span(
                "stage",
                context=parent_context(traceparent),
                attributes={"stage.name": active.record.name},
            ):
                state = await self._work(active, publisher)
            self._held.moved(active.record.name)
        except asyncio.CancelledError:
            state, error = StageState.STOPPED, "the service ended"
            raise
        except Exception as failure:
            error = explained(failure)
            if is_expected(failure):
                logger.warning("stage %s failed: %s", active.record.name, error)
            else:
                logger.exception("stage %s failed by a bug", active.record.name)
        finally:
            await self._ended(active, state, error)

    async def _work(self, active: ActiveStage, publisher: WeightsPublisher | None) -> StageState:
        context, recipe = active.context, active.recipe
        resumed = await take_up_weights(context, self._held, self._registry, recipe)
        if isinstance(recipe, GrpoConfig):
            assert publisher is not None
            # Listing a large set can take long: the caller of StartStage does not wait for it.
            tasks = recipe.tasks or await self._peers.list_tasks(
                recipe.task_set, limit=recipe.max_tasks
            )
            active.stage = build_grpo(
                context,
                self._held,
                recipe,
                resumed,
                peers=self._peers,
                publisher=publisher,
                tasks=tasks,
                newest_number=0 if self._newest is None else self._newest.number,
            )
        else:
            active.stage = await build_sft(
                context, self._held, recipe, resumed, model=self._config.model
            )
        return await active.stage.run()

    async def _ended(self, active: ActiveStage, state: StageState, error: str) -> None:
        record = replace(self._with_progress(active.record), state=state, error=error)
        self._active = None
        # The disk may be full: each is tried, and watchers hear it all the same.
        try:
            await self._append_end(record)
        except (OSError, TrainerError):
            logger.exception("stage %s: its end is not in its events", record.name)
        try:
            self._registry.put(record)
        except OSError:
            logger.exception("stage %s: its end is not in the run's record", record.name)
        active.ended.set()

    async def _append_end(self, record: StageRecord) -> None:
        end = {"state": record.state.value, "steps": record.step, "error": record.error}
        await self._log(record.name).append(EventKind.ENDED, end)

    async def stop_active(self) -> None:
        """Let the stage at hand finish its step and write a checkpoint, as the service ends."""
        active = self._active
        if active is None:
            return
        active.context.stop.set()
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                await active.ended.wait()
        except TimeoutError:
            logger.warning(
                "stage %s did not end within %.0f s; it goes on from its last checkpoint",
                active.record.name,
                STOP_GRACE_S,
            )

    async def _acquire(self) -> WeightsPublisher:
        if self._publisher is None:
            inner = await self._peers.acquire_publisher(known_number=self._held.known_number)
            self._publisher = RecordedPublisher(inner, self._published)
        return self._publisher

    def _published(self, version: PolicyVersion) -> None:
        self._newest = version
        self._held.known_number = max(self._held.known_number, version.number)

    def _check_publishable(self, stage: str) -> None:
        active = self._active
        if active is not None and active.record.kind is StageKind.GRPO:
            raise StageConflict(
                f"stage {active.record.name!r} publishes its own versions; stop it first"
            )
        if active is not None and stage in ("", active.record.name):
            raise StageConflict(
                f"stage {active.record.name!r} is training the weights held now; name a stage that "
                f"has finished, or {BASE!r}"
            )
        if stage not in ("", BASE):
            self._find(stage)

    def _find(self, name: str) -> StageRecord:
        record = self._registry.find(name)
        if record is None:
            names = [known.name for known in self._registry.stages]
            raise UnknownStage(f"no stage is named {name!r}; the run has {names}")
        return record

    def _with_progress(self, record: StageRecord) -> StageRecord:
        active = self._active
        if active is None or active.record.name != record.name or active.stage is None:
            return record
        return replace(record, step=active.stage.step, steps_total=active.stage.steps_total)

    def _is_over(self, log: EventLog, name: str) -> bool:
        running = self._active is not None and self._active.record.name == name
        return not running and bool(log.events) and log.events[-1].kind is EventKind.ENDED

    def _log(self, name: str) -> EventLog:
        log = self._logs.get(name)
        if log is None:
            file = self._registry.stage_folder(name) / "events.jsonl"
            log = self._logs[name] = EventLog(file)
        return log
