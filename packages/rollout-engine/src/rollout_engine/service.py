"""The gRPC servicer: one `Session` for each stream, and the engine's status."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from importlib import metadata
from typing import Any

import grpc
from service_kit.errors import InvalidArgument, Reason, service_error
from service_kit.streams import with_idle_deadline
from tailrace.rollout.v1 import rollout_service_pb2 as pb
from tailrace.rollout.v1 import rollout_service_pb2_grpc as pb_grpc

from rollout_engine.core.concurrency import LimiterStatus
from rollout_engine.errors import LedgerDiskFullError
from rollout_engine.ledger.store import Ledger
from rollout_engine.policy import EngineStatus
from rollout_engine.session import Session, Sessions, SessionSettings
from rollout_engine.supervisor import Supervisor
from rollout_engine.wire import MAX_ID_LENGTH
from rollout_engine.wire_enums import PURPOSES

logger = logging.getLogger(__name__)

SERVICE_NAME = "tailrace.rollout.v1.RolloutService"


class RolloutServicer(pb_grpc.RolloutServiceServicer):
    """Serves `RolloutService`.

    Args:
        idle_s: A consumer that is silent for longer is disconnected.
        limiters: Figures of every limiter, for the status.
        engines: Every engine as last seen, for the status.

    """

    def __init__(
        self,
        *,
        engine_id: str,
        ledger: Ledger,
        supervisor: Supervisor,
        settings: SessionSettings,
        idle_s: float,
        limiters: Callable[[], Sequence[LimiterStatus]],
        engines: Callable[[], Sequence[EngineStatus]],
    ) -> None:
        self._engine_id = engine_id
        self._ledger = ledger
        self._supervisor = supervisor
        self._settings = settings
        self._idle_s = idle_s
        self._limiters = limiters
        self._engines = engines
        self._sessions = Sessions()

    async def drain(self) -> None:
        """End all streams; assignments are refused from now on."""
        await self._sessions.drain()

    async def RunGroups(  # type: ignore[override]  # noqa: N802 -- it writes by itself
        self,
        request_iterator: AsyncIterator[pb.RunGroupsRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Serve one consumer; see docs/rollout-stream.md."""
        requests = with_idle_deadline(request_iterator, self._idle_s, "RunGroups")
        async with contextlib.aclosing(requests):  # type: ignore[type-var]
            hello = await _hello(requests)
            session = Session(
                engine_id=self._engine_id,
                hello=hello,
                requests=requests,
                send=context.write,
                ledger=self._ledger,
                supervisor=self._supervisor,
                settings=self._settings,
                is_draining=lambda: self._sessions.draining,
            )
            self._sessions.enter(session)
            logger.info(
                "consumer %s connects as incarnation %d at cursor %d",
                hello.consumer_id,
                hello.incarnation,
                hello.cursor,
            )
            try:
                await session.run()
            except* LedgerDiskFullError as full:
                raise service_error(
                    Reason.DISK_FULL, str(full.exceptions[0]), retryable=True
                ) from full
            finally:
                self._sessions.leave(session)
                logger.info("consumer %s is gone", hello.consumer_id)

    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetStatusResponse:
        """Tell engines, limiters, groups, outcomes and consumers."""
        return pb.GetStatusResponse(
            engine_id=self._engine_id,
            version=metadata.version("rollout-engine"),
            engines=[
                pb.EngineStatus(
                    url=engine.url,
                    healthy=engine.healthy,
                    weight_version=engine.weight_version,
                    running=engine.running,
                    waiting=engine.waiting,
                    tokens_generated=engine.tokens_generated,
                )
                for engine in self._engines()
            ],
            limiters=[
                pb.LimiterStatus(
                    name=limiter.name,
                    limit=limiter.limit,
                    in_use=limiter.in_use,
                    waiting=limiter.waiting,
                    wait_p50_s=limiter.wait_p50_s,
                    wait_max_s=limiter.wait_max_s,
                )
                for limiter in self._limiters()
            ],
            groups=await self._ledger.counts(),
            outcomes=self._supervisor.outcomes(),
            consumers=self._sessions.consumers,
            quarantined_tasks=await self._ledger.quarantined_tasks(),
        )


async def _hello(requests: AsyncIterator[pb.RunGroupsRequest]) -> pb.Hello:
    first = await anext(requests, None)
    if first is None or first.WhichOneof("message") != "hello":
        raise InvalidArgument("the first message of RunGroups must be a Hello")
    hello = first.hello
    if not 0 < len(hello.consumer_id) <= MAX_ID_LENGTH:
        raise InvalidArgument(
            f"consumer_id has {len(hello.consumer_id)} characters; expected 1 to {MAX_ID_LENGTH}"
        )
    if hello.cursor < 0:
        raise InvalidArgument(f"cursor is {hello.cursor}; expected 0 or one that was delivered")
    PURPOSES.from_proto(hello.purpose)
    return hello


__all__ = ["SERVICE_NAME", "RolloutServicer"]
