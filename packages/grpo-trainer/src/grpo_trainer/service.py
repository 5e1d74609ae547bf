"""TrainerService: translate, call the run, translate back."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from importlib.metadata import version
from typing import Any

import grpc
from service_kit.errors import ServiceError, service_error
from service_kit.streams import with_heartbeat
from tailrace.trainer.v1 import trainer_service_pb2 as pb
from tailrace.trainer.v1 import trainer_service_pb2_grpc as pb_grpc
from weight_sync.errors import Fenced, WeightSyncError

from grpo_trainer import wire
from grpo_trainer.errors import FencedOff, TrainerError
from grpo_trainer.run import TrainerRun

SERVICE_NAME = "tailrace.trainer.v1.TrainerService"
PACKAGE_VERSION = version("grpo-trainer")

Context = grpc.aio.ServicerContext[Any, Any]


class TrainerServicer(pb_grpc.TrainerServiceServicer):
    """The servicer of one run.

    Args:
        run: Opened.
        heartbeat_s: Longest silence of a watch.
    """

    def __init__(self, run: TrainerRun, *, heartbeat_s: float) -> None:
        self._run = run
        self._heartbeat_s = heartbeat_s

    async def StartStage(  # noqa: N802
        self, request: pb.StartStageRequest, context: Context
    ) -> pb.StartStageResponse:
        """Start a stage, or pick it up where its checkpoint left it."""
        with _service_errors():
            step = await self._run.start_stage(
                request.name,
                wire.kind_from_proto(request.kind),
                request.recipe_toml,
                request.traceparent,
            )
        return pb.StartStageResponse(step=step)

    async def WatchStage(  # noqa: N802
        self, request: pb.WatchStageRequest, context: Context
    ) -> AsyncIterator[pb.WatchStageResponse]:
        """Yield events of a stage, heartbeats in between."""
        responses = with_heartbeat(
            self._events(request.name, request.cursor), self._heartbeat_s, wire.heartbeat
        )
        async for response in responses:
            yield response

    async def StopStage(  # noqa: N802
        self, request: pb.StopStageRequest, context: Context
    ) -> pb.StopStageResponse:
        """Finish the step at hand, write a checkpoint, end the stage."""
        with _service_errors():
            return pb.StopStageResponse(step=await self._run.stop_stage(request.name))

    async def PublishWeights(  # noqa: N802
        self, request: pb.PublishWeightsRequest, context: Context
    ) -> pb.PublishWeightsResponse:
        """Publish weights without training."""
        with _service_errors():
            published = await self._run.publish_weights(request.stage)
        return pb.PublishWeightsResponse(version=wire.version_to_proto(published))

    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        """Say where the run is."""
        return wire.status_to_proto(self._run.status(), PACKAGE_VERSION)

    async def _events(self, name: str, cursor: int) -> AsyncIterator[pb.WatchStageResponse]:
        with _service_errors():
            async for event in self._run.watch(name, cursor):
                yield wire.event_to_proto(event)


@contextlib.contextmanager
def _service_errors() -> Iterator[None]:
    """Turn this package's errors into the ones that travel, with their reasons."""
    try:
        yield
    except TrainerError as error:
        raise service_error(error.reason, str(error)) from error
    except Fenced as error:
        raise service_error(FencedOff.reason, str(error)) from error
    except WeightSyncError as error:
        raise ServiceError(str(error), retryable=error.retryable) from error
