"""The standard `grpc.health.v1` service, and waiting for a peer to serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service_kit.errors import ServiceError, Unavailable, error_from_rpc

HEALTH_SERVICE: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_Status = health_pb2.HealthCheckResponse.ServingStatus

Context = grpc.aio.ServicerContext[Any, Any]


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Serves the state of each service, and of the whole server under the empty name.

    Unlike the servicer of grpc_health it ends every `Watch` when the server drains, so that a
    watcher never holds the drain up for its whole grace.
    """

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {"": False}
        self._draining = False
        self._changed = asyncio.Event()

    def set_serving(self, service: str, *, serving: bool) -> None:
        """Set a state. After `drain` nothing serves again."""
        self._serving[service] = serving and not self._draining
        self._wake()

    def drain(self) -> None:
        """Set everything to NOT_SERVING for good; watchers are told and their streams end."""
        self._draining = True
        self._serving = dict.fromkeys(self._serving, False)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, service: str) -> int | None:
        serving = self._serving.get(service)
        if serving is None:
            return None
        status: int = _Status.SERVING if serving else _Status.NOT_SERVING
        return status

    async def Check(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Answer with the state of `request.service`."""
        status = self._status(request.service)
        if status is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"no service {request.service!r} here; known: {sorted(self._serving)}",
            )
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: N802
        """Send the state of `request.service` now and after each change, until the drain."""
        last: int | None = None
        while True:
            # Before the status: a drain that begins while that is sent is told in the next turn.
            changed, draining = self._changed, self._draining
            status = self._status(request.service)
            current = _Status.SERVICE_UNKNOWN if status is None else status
            if current != last:
                yield health_pb2.HealthCheckResponse(status=current)
                last = current
            if draining:
                return
            await changed.wait()


async def wait_until_serving(
    channel: grpc.aio.Channel,
    *,
    service: str = "",
    timeout_s: float,
    poll_s: float = 0.05,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Wait until the peer answers its health check with SERVING.

    Args:
        channel: To the peer, from `open_channel` or plain; need not be connected.
        service: Full name of the service, or empty for the whole server.
        timeout_s: Longest wait in all.
        poll_s: Pause between checks of a peer that answers, but does not serve yet.
        clock: For tests.

    Raises:
        Unavailable: When the time is up; the message tells the last state seen.
        Unimplemented: When the peer has no health service.
    """
    check = health_pb2_grpc.HealthStub(channel).Check
    ends = clock() + timeout_s
    last = "no answer yet"
    while (left := ends - clock()) > 0:
        try:
            reply = await check(
                health_pb2.HealthCheckRequest(service=service),
                # Short: a connection that hangs half open must not eat the whole budget.
                timeout=min(left, 2.0),
                wait_for_ready=True,
            )
        except (grpc.aio.AioRpcError, ServiceError) as error:
            seen = error_from_rpc(error) if isinstance(error, grpc.aio.AioRpcError) else error
            if seen.code is grpc.StatusCode.UNIMPLEMENTED:
                raise seen from error
            last = seen.message
        else:
            if reply.status == _Status.SERVING:
                return
            last = str(_Status.Name(reply.status))
        await asyncio.sleep(min(poll_s, max(0.0, ends - clock())))
    raise Unavailable(
        f"{service or 'the server'} did not serve within {timeout_s:g} s; last seen: {last}"
    )
