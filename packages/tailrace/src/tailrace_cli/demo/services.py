"""The demo's calls to the running services: deadlines, and patience while one is restarted."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import grpc
from service_kit.channel import ChannelConfig, open_channel
from service_kit.errors import ServiceError, Unavailable
from service_kit.streams import with_idle_deadline
from tailrace.eval.v1 import eval_service_pb2 as eval_pb
from tailrace.eval.v1.eval_service_pb2_grpc import EvalServiceStub
from tailrace.trainer.v1 import trainer_service_pb2 as trainer_pb
from tailrace.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from tailrace.weight_sync.v1 import weight_service_pb2 as weights_pb
from tailrace.weight_sync.v1.weight_service_pb2_grpc import WeightServiceStub

from tailrace_cli.evaluation.service import follow_evaluation
from tailrace_cli.patience import Patience, patiently

log = logging.getLogger(__name__)

CALL_S = 30.0
PUBLISH_S = 120.0
STREAM_IDLE_S = 120.0
CONTRACTS = (eval_pb.DESCRIPTOR, trainer_pb.DESCRIPTOR, weights_pb.DESCRIPTOR)
STAGE_KINDS = {"sft": trainer_pb.STAGE_KIND_SFT, "rl": trainer_pb.STAGE_KIND_GRPO}
STATES = {
    trainer_pb.STAGE_STATE_FINISHED: "finished",
    trainer_pb.STAGE_STATE_STOPPED: "stopped",
    trainer_pb.STAGE_STATE_FAILED: "failed",
}


class StageFailedError(Exception):
    """The trainer ended a stage with an error; its message says which."""


@dataclass(frozen=True)
class StageBegan:
    """The trainer runs the stage, from this step on; again after each restart of the trainer."""

    step: int


@dataclass(frozen=True)
class StageStep:
    """Figures of one optimizer step."""

    cursor: int
    step: int
    values: dict[str, float]
    counts: dict[str, int]


@dataclass(frozen=True)
class StageVersion:
    """The trainer published weights."""

    cursor: int
    number: int
    step: int


@dataclass(frozen=True)
class StageNote:
    """Something worth a line."""

    cursor: int
    text: str


@dataclass(frozen=True)
class StageEnd:
    """The stage is over: finished or stopped."""

    state: str
    steps: int


StageEvent = StageBegan | StageStep | StageVersion | StageNote | StageEnd


class Services:
    """Typed calls to the services of one stack. All of them are idempotent by name or number."""

    def __init__(self, channels: Mapping[str, grpc.aio.Channel]) -> None:
        self.eval = EvalServiceStub(channels["eval"])
        self.trainer = TrainerServiceStub(channels["trainer"])
        self.weights = WeightServiceStub(channels["weights"])

    async def publish(self, stage: str) -> int:
        """Publishes a stage's weights ("base": the initial ones) and waits until all engines serve.

        Returns:
            The version's number.
        """
        request = trainer_pb.PublishWeightsRequest(stage=stage)
        reply = await patiently(
            "publishing weights",
            lambda: self.trainer.PublishWeights(request, timeout=PUBLISH_S),
        )
        number = int(reply.version.number)
        await self.await_version(number)
        return number

    async def await_version(self, number: int) -> None:
        """Waits until all engines serve a version or a newer one.

        Raises:
            Unavailable: they do not within `PATIENCE_S`.
        """
        request = weights_pb.AwaitVersionRequest(number=number)

        async def served() -> None:
            reply = await self.weights.AwaitVersion(request, timeout=PUBLISH_S)
            # It answers with what there is when its time is up, or when it has to end.
            if not reply.engines or reply.oldest_version < number:
                raise Unavailable(
                    f"engines do not serve version {number}: {reply.engines} have it, the oldest "
                    f"is at {reply.oldest_version}; see the logs of 'weights' and 'engine'"
                )

        await patiently(f"waiting for version {number}", served)

    async def evaluate(
        self, request: eval_pb.EvaluateRequest
    ) -> AsyncIterator[eval_pb.EvaluationProgress | eval_pb.EvaluationReport]:
        """Progress of an evaluation, and its report last."""
        async for event in follow_evaluation(self.eval, request):
            if not isinstance(event, eval_pb.EvaluationPlan):
                yield event

    async def start_stage(self, name: str, recipe_toml: str, kind: str = "") -> int:
        """Starts or resumes a stage of a kind (default: its name).

        Returns:
            The step it goes on from.
        """
        request = trainer_pb.StartStageRequest(
            name=name, kind=STAGE_KINDS[kind or name], recipe_toml=recipe_toml
        )
        reply = await patiently(
            f"starting stage {name}", lambda: self.trainer.StartStage(request, timeout=CALL_S)
        )
        return int(reply.step)

    async def activity(self) -> tuple[int, int] | None:
        """Groups in flight and groups ready to be trained; None while the trainer is away."""
        try:
            status = await self.trainer.GetStatus(trainer_pb.GetStatusRequest(), timeout=CALL_S)
        except ServiceError as error:
            log.info("no activity to show: %s", error)
            return None
        return status.groups_in_flight, status.groups_ready

    async def stop_stage(self, name: str) -> None:
        """Asks a stage to finish its step, write a checkpoint and end."""
        request = trainer_pb.StopStageRequest(name=name)
        await patiently(
            f"stopping stage {name}", lambda: self.trainer.StopStage(request, timeout=PUBLISH_S)
        )

    async def follow_stage(
        self, name: str, recipe_toml: str, kind: str = "", *, cursor: int = 0
    ) -> AsyncIterator[StageEvent]:
        """Starts a stage of a kind (default: its name) and yields its events to its end.

        Goes on across restarts of the trainer, which keeps its events. No event comes twice.

        Args:
            name: The stage's.
            recipe_toml: Its recipe.
            kind: `sft` or `rl`; default: the stage's name.
            cursor: Of the last event that was seen before.

        Raises:
            StageFailedError: the stage ended with an error.
        """
        patience = Patience(f"stage {name}")
        yield StageBegan(await self.start_stage(name, recipe_toml, kind))
        while True:
            request = trainer_pb.WatchStageRequest(name=name, cursor=cursor)
            call = self.trainer.WatchStage(request)
            try:
                async for reply in with_idle_deadline(call, STREAM_IDLE_S, f"stage {name}"):
                    patience.renew()
                    cursor = max(cursor, reply.cursor)
                    event = _stage_event(name, reply)
                    if event is not None:
                        yield event
                    if isinstance(event, StageEnd):
                        return
            except ServiceError as error:
                await patience.after(error)
                yield StageBegan(await self.start_stage(name, recipe_toml, kind))


def _stage_event(name: str, reply: trainer_pb.WatchStageResponse) -> StageEvent | None:
    match reply.WhichOneof("event"):
        case "step":
            step = reply.step
            return StageStep(reply.cursor, step.step, dict(step.values), dict(step.counts))
        case "version":
            version = reply.version.version
            return StageVersion(reply.cursor, version.number, version.step)
        case "note":
            return StageNote(reply.cursor, reply.note)
        case "ended":
            state = STATES.get(reply.ended.state, "failed")
            if state == "failed":
                raise StageFailedError(f"stage {name} failed: {reply.ended.error}")
            return StageEnd(state, reply.ended.steps)
        case _:
            return None


@contextlib.asynccontextmanager
async def connect(targets: Mapping[str, str]) -> AsyncIterator[Services]:
    """Channels to the services by process name (`eval`, `trainer`, `weights`)."""
    async with contextlib.AsyncExitStack() as stack:
        channels = {}
        for name, target in targets.items():
            channel = open_channel(ChannelConfig(target=target), contracts=CONTRACTS)
            stack.push_async_callback(channel.close)
            channels[name] = channel
        yield Services(channels)
