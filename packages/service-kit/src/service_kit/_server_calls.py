"""What surrounds every handler: token, deadline, errors as rich status."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeAlias

import grpc
from opentelemetry import trace

from service_kit._in_flight import InFlight
from service_kit._rpc_telemetry import ServerTelemetry
from service_kit.auth import carries_token
from service_kit.errors import (
    RETRY_PUSHBACK_KEY,
    STATUS_DETAILS_KEY,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    Reason,
    ResourceExhausted,
    ServiceError,
    Unauthenticated,
    Unavailable,
    error_from_rpc,
    leaf_errors,
    status_from_error,
)

logger = logging.getLogger("service_kit.server")

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # not subscriptable at run time
Behavior = Callable[[Any, Context], Awaitable[Any]]
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"


class _Wrapped(NamedTuple):
    original: Handler
    guarded: Handler


class ServiceInterceptor(grpc.aio.ServerInterceptor):
    """The one interceptor of a `Server`.

    Handlers are wrapped once and kept, so that a call pays a dictionary look-up and the checks.

    Args:
        token: Callers must send it; None for no check.
        require_deadline: Refuse unary calls without a deadline.
        open_services: Full names of services that need neither token nor deadline, as health.
        in_flight: Counts the calls, and refuses them once it is closed.
        telemetry: Records the calls; None for no recording.
    """

    def __init__(
        self,
        *,
        token: str | None,
        require_deadline: bool,
        open_services: Sequence[str],
        in_flight: InFlight,
        telemetry: ServerTelemetry | None = None,
    ) -> None:
        self._in_flight = in_flight
        self._telemetry = telemetry
        self._token = token
        self._require_deadline = require_deadline
        self._open = tuple(f"/{name}/" for name in open_services)
        self._wrapped: dict[str, _Wrapped] = {}

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Return the guarded handler, or one that refuses the call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method: str = handler_call_details.method
        known = self._wrapped.get(method)
        if known is None or known.original is not handler:
            known = self._wrapped[method] = _Wrapped(handler, self._guard(method, handler))
        if (
            self._token is not None
            and not method.startswith(self._open)
            and not carries_token(handler_call_details.invocation_metadata, self._token)
        ):
            return _refusal(handler)
        return known.guarded

    def _guard(self, method: str, handler: Handler) -> Handler:
        if method.startswith(self._open):
            return handler
        behavior = as_coroutine(handler)
        needs_deadline = (
            self._require_deadline
            and not handler.request_streaming
            and not handler.response_streaming
        )

        in_flight = self._in_flight

        async def guarded(request: Any, context: Context) -> Any:
            if in_flight.closed:
                await abort(context, _draining("takes no new calls"))
            if needs_deadline and context.time_remaining() is None:
                await abort(context, _deadline_required(method))
            task = asyncio.current_task()
            assert task is not None
            in_flight.enter(task)
            try:
                return await behavior(request, context)
            except grpc.aio.AbortError:
                raise
            except asyncio.CancelledError:
                if in_flight.was_cut(task):
                    task.uncancel()
                    await abort(context, _draining(f"ended before {method} did"))
                if task.cancelling():
                    raise  # the client has cancelled the call, or its deadline has passed
                await abort(context, Cancelled(f"{method} was cancelled inside the service"))
            except Exception as error:
                await abort(context, as_service_error(error, method))
            finally:
                in_flight.leave(task)

        if self._telemetry is not None:
            return rebuilt(handler, self._telemetry.around(method, guarded))
        return rebuilt(handler, guarded)


def as_coroutine(handler: Handler) -> Behavior:
    """Return the handler's function as one that is awaited, whatever its kind."""
    behavior: Any = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    if inspect.iscoroutinefunction(behavior):
        awaited: Behavior = behavior
        return awaited
    if not inspect.isasyncgenfunction(behavior):
        raise TypeError(f"{behavior!r} must be an `async def`: servers here run on one event loop")

    async def drive(request: Any, context: Context) -> None:
        # Closed here and not by the garbage collector: a cancelled stream frees what it holds now.
        async with contextlib.aclosing(behavior(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return drive


def rebuilt(handler: Handler, behavior: Behavior) -> Handler:
    """Return a handler of the same kind around another function."""
    if handler.request_streaming:
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
    else:
        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
    made: Handler = make(behavior, handler.request_deserializer, handler.response_serializer)
    return made


def _refusal(handler: Handler) -> Handler:
    async def refuse(request: Any, context: Context) -> None:
        await abort(
            context,
            Unauthenticated(
                "expected metadata 'authorization: Bearer <token>' with this server's token; "
                "set the token in the config of the client's channel"
            ),
        )

    return rebuilt(handler, refuse)


def _deadline_required(method: str) -> ServiceError:
    return InvalidArgument(
        f"{method} was called without a deadline; pass a timeout with the call",
        reason=Reason.DEADLINE_REQUIRED,
    )


def _draining(what: str) -> ServiceError:
    return Unavailable(
        f"the server is shutting down and {what}; call again, it or another will serve",
        reason=Reason.DRAINING,
    )


def as_service_error(error: Exception, method: str) -> ServiceError:
    """Return what a handler's exception means to the caller; unexpected ones are logged here."""
    leaves = list(leaf_errors(error))
    if all(isinstance(leaf, ServiceError) for leaf in leaves):
        first = leaves[0]
        assert isinstance(first, ServiceError)
        return first
    cause = leaves[0] if len(leaves) == 1 else error
    if isinstance(cause, grpc.aio.AioRpcError):
        return error_from_rpc(cause, where=f"a call made by {method}")
    if isinstance(cause, OSError) and cause.errno in {errno.ENOSPC, errno.EDQUOT}:
        logger.error("%s failed: %s", method, cause)
        place = f" at {cause.filename}" if cause.filename else ""
        return ResourceExhausted(
            f"the service's disk is full{place}; free some space and call again",
            reason=Reason.DISK_FULL,
            retryable=False,
        )
    if isinstance(cause, TimeoutError):
        return DeadlineExceeded(f"{method} ran out of time: {cause or 'an inner limit passed'}")
    logger.error("%s failed unexpectedly", method, exc_info=error)
    trace.get_current_span().record_exception(error)
    return Internal(f"{method} failed with {type(cause).__name__}: {cause}; see the service's log")


@dataclass(frozen=True)
class _RichStatus(grpc.Status):
    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


async def abort(context: Context, error: ServiceError) -> NoReturn:
    """End the call with the error. Raises `grpc.aio.AbortError`, always."""
    status = status_from_error(error)
    trailers: list[tuple[str, str | bytes]] = [(STATUS_DETAILS_KEY, status.SerializeToString())]
    pushback = _pushback_ms(error, context.time_remaining())
    if pushback is not None:
        trailers.append((RETRY_PUSHBACK_KEY, str(pushback)))
    await context.abort_with_status(_RichStatus(error.code, status.message, tuple(trailers)))


def _pushback_ms(error: ServiceError, remaining_s: float | None) -> int | None:
    """Return what gRPC's own retries shall wait, -1 for "do not retry", None for their backoff."""
    if error.code is not grpc.StatusCode.UNAVAILABLE:
        return None
    if not error.retryable:
        return -1
    if error.retry_after_s is None:
        return None
    # A wait beyond the deadline would only hide the reason behind DEADLINE_EXCEEDED.
    if remaining_s is not None and error.retry_after_s >= remaining_s:
        return -1
    return round(error.retry_after_s * 1000)
