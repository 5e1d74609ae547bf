"""Calls of a channel: with a deadline, the token and telemetry; failing with `ServiceError`.

These wrap the multi-callables of a plain channel and do not use gRPC's client interceptors. Those
put a task between caller and call, turn `write()` into a queue, and lose a cancellation or a
dropped stream; a thin wrapper costs a few microseconds and keeps the call's own semantics.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import grpc

from service_kit._rpc_telemetry import CORE_FAILURE, ClientMethodTelemetry
from service_kit.deadlines import MissingDeadlineError
from service_kit.errors import ServiceError, Unavailable, error_from_rpc

_STATUS_PAUSES_S = (0.0, 0.001, 0.01, 0.1, 1.0)

Metadata = tuple[tuple[str, str | bytes], ...]
Requests = AsyncIterable[Any] | Iterable[Any]
Q = TypeVar("Q")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """What a channel adds to each of its calls."""

    target: str
    default_timeout_s: float | None
    metadata: Metadata
    wait_for_ready: bool | None


@dataclass(frozen=True, slots=True)
class Method:
    """One method of the peer, seen from a channel."""

    name: str
    """`/package.Service/Method`."""
    policy: CallPolicy
    telemetry: ClientMethodTelemetry | None = None

    def start(self, call: Callable[..., Any], argument: Any, options: dict[str, Any]) -> Any:
        """Start the plain call, in a span if there is telemetry."""
        if self.telemetry is None:
            return call(argument, **options)
        return self.telemetry.start(call, argument, options)

    @property
    def where(self) -> str:
        """Method and target, for messages."""
        return f"{self.name.lstrip('/')} at {self.policy.target}"

    def options(
        self, timeout: float | None, options: dict[str, Any], *, unary: bool
    ) -> dict[str, Any]:
        """Return the call's options, completed."""
        policy = self.policy
        if timeout is None and unary:
            timeout = policy.default_timeout_s
            if timeout is None:
                raise MissingDeadlineError(
                    f"{self.where} was called without a timeout: pass timeout=SECONDS with the "
                    "call, or set default_timeout_s in the channel's config"
                )
        given = options.get("metadata")
        metadata = (*policy.metadata, *given) if given else policy.metadata
        options["metadata"] = metadata
        options["timeout"] = timeout
        if options.get("wait_for_ready") is None:
            options["wait_for_ready"] = policy.wait_for_ready
        return options


class _Requests:
    """A caller's request iterator, which keeps what it failed with.

    gRPC answers an exception of the iterator by cancelling the call, and tells nobody why. Nor does
    it stop waiting for the next request when the call has ended; `stop` does.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._reader: asyncio.Task[Any] | None = None
        self.error: Exception | None = None

    def stop(self, _ended: Any) -> None:
        """Stop reading requests; for the call's done callback."""
        if self._reader is not None:
            self._reader.cancel()

    async def __aiter__(self) -> AsyncIterator[Any]:
        self._reader = asyncio.current_task()
        try:
            if isinstance(self._requests, AsyncIterable):
                async for request in self._requests:
                    yield request
            else:
                for request in self._requests:
                    yield request
        except Exception as error:
            self.error = error
            raise
        finally:
            self._reader = None


class _Call(grpc.aio.Call):
    """Delegates to the plain call; cancels it when the caller drops this one."""

    def __init__(self, inner: Any, method: Method, requests: _Requests | None = None) -> None:
        self._inner = inner
        self._method = method
        self._requests = requests
        if requests is not None:
            inner.add_done_callback(requests.stop)

    def __del__(self) -> None:
        # The plain call is part of a reference cycle as soon as it has a callback, and would run
        # on until the garbage collector finds it.
        inner = getattr(self, "_inner", None)
        if inner is not None and not inner.done():
            inner.cancel()

    async def _failure(self, error: grpc.aio.AioRpcError) -> ServiceError | None:
        """Return what the call failed with, or None if it has ended well after all.

        When the server ends a call while the client still writes, grpc.aio sets a status of its
        own, and the server's comes a moment later.
        """
        for pause_s in _STATUS_PAUSES_S:
            if error.details() != CORE_FAILURE:
                break
            await asyncio.sleep(pause_s)
            code = await self._inner.code()
            if code is grpc.StatusCode.OK:
                return None
            error = grpc.aio.AioRpcError(
                code,
                trailing_metadata=await self._inner.trailing_metadata(),
                details=await self._inner.details(),
            )
        return error_from_rpc(error, where=self._method.where)

    def _explain_cancellation(self) -> None:
        """Raise the request iterator's error if that, and nobody else, cancelled the call."""
        failed = self._requests.error if self._requests is not None else None
        task = asyncio.current_task()
        if failed is not None and (task is None or not task.cancelling()):
            raise failed

    def cancelled(self) -> bool:
        """Tell whether the call was cancelled."""
        return bool(self._inner.cancelled())

    def done(self) -> bool:
        """Tell whether the call has ended."""
        return bool(self._inner.done())

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline, or None."""
        left: float | None = self._inner.time_remaining()
        return left

    def cancel(self) -> bool:
        """Cancel the call on both sides; False if it had ended."""
        return bool(self._inner.cancel())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback` with the plain call when the call ends."""
        self._inner.add_done_callback(callback)

    async def initial_metadata(self) -> grpc.aio.Metadata:
        """Return the headers the server sent."""
        found: grpc.aio.Metadata = await self._inner.initial_metadata()
        return found

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        """Return the trailers the server sent."""
        found: grpc.aio.Metadata = await self._inner.trailing_metadata()
        return found

    async def code(self) -> grpc.StatusCode:
        """Return the final status, once there is one."""
        found: grpc.StatusCode = await self._inner.code()
        return found

    async def details(self) -> str:
        """Return the final status's message."""
        found: str = await self._inner.details()
        return found

    async def wait_for_connection(self) -> None:
        """Wait until the call is on a connection."""
        try:
            await self._inner.wait_for_connection()
        except grpc.aio.AioRpcError as error:
            if (failure := await self._failure(error)) is not None:
                raise failure from error


class _UnaryResponse(_Call):
    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from self._inner.__await__())
        except grpc.aio.AioRpcError as error:
            failure = yield from self._failure(error).__await__()
            raise failure or Unavailable(
                f"{self._method.where} answered before it had read all requests, and the answer "
                "is lost; call again, and let the service read to the end"
            ) from error
        except asyncio.CancelledError:
            self._explain_cancellation()
            raise


class _StreamResponse(_Call):
    _messages: AsyncIterator[Any] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._messages is None:
            self._messages = self._inner.__aiter__()
        try:
            return await anext(self._messages)
        except grpc.aio.AioRpcError as error:
            raise await self._failure(error) or StopAsyncIteration from error
        except asyncio.CancelledError:
            self._explain_cancellation()
            raise

    async def read(self) -> Any:
        """Return the next message, or `grpc.aio.EOF`.

        Reads through the iterator: the plain call's own `read` drops the messages that are still
        to be read when the status arrives.
        """
        try:
            return await anext(self)
        except StopAsyncIteration:
            return grpc.aio.EOF


class _StreamRequest(_Call):
    async def write(self, request: Any) -> None:
        """Send one message; waits while the flow control holds it back.

        Raises:
            asyncio.InvalidStateError: The call has ended. Read on, or await the response, to learn
                how; the server's status may stand behind messages that are still to be read.
            ServiceError: The call has failed.
        """
        try:
            await self._inner.write(request)
        except grpc.aio.AioRpcError as error:
            if error.details() == CORE_FAILURE:
                raise asyncio.InvalidStateError(
                    f"{self._method.where} has ended: read on to learn how"
                ) from error
            raise error_from_rpc(error, where=self._method.where) from error

    async def done_writing(self) -> None:
        """Tell the server that no message follows."""
        await self._inner.done_writing()


class UnaryUnaryCall(_UnaryResponse, grpc.aio.UnaryUnaryCall[Any, Any]):
    """One request, one response: `await` it."""


class UnaryStreamCall(_StreamResponse, grpc.aio.UnaryStreamCall[Any, Any]):
    """One request, many responses: `async for` over it, or `read()`."""


class StreamUnaryCall(_StreamRequest, _UnaryResponse, grpc.aio.StreamUnaryCall[Any, Any]):
    """Many requests, one response."""


class StreamStreamCall(_StreamRequest, _StreamResponse, grpc.aio.StreamStreamCall[Any, Any]):
    """Many requests, many responses."""


class _Callable:
    """A plain multi-callable and the method it calls."""

    def __init__(self, inner: Any, method: Method) -> None:
        self._inner = inner
        self._method = method


class UnaryUnary(_Callable, grpc.aio.UnaryUnaryMultiCallable[Any, Any]):
    """Makes unary calls; refuses to without a timeout."""

    def __call__(self, request: Any, *, timeout: float | None = None, **options: Any) -> Any:
        """Start the call."""
        options = self._method.options(timeout, options, unary=True)
        return UnaryUnaryCall(self._method.start(self._inner, request, options), self._method)


class UnaryStream(_Callable, grpc.aio.UnaryStreamMultiCallable[Any, Any]):
    """Makes calls whose responses stream."""

    def __call__(self, request: Any, *, timeout: float | None = None, **options: Any) -> Any:
        """Start the call."""
        options = self._method.options(timeout, options, unary=False)
        return UnaryStreamCall(self._method.start(self._inner, request, options), self._method)


class StreamUnary(_Callable, grpc.aio.StreamUnaryMultiCallable[Any, Any]):
    """Makes calls whose requests stream."""

    def __call__(
        self,
        request_iterator: Any = None,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        """Start the call; without an iterator, `write()` the requests."""
        options = self._method.options(
            timeout,
            {
                "metadata": metadata,
                "credentials": credentials,
                "wait_for_ready": wait_for_ready,
                "compression": compression,
            },
            unary=False,
        )
        requests = _Requests(request_iterator) if request_iterator is not None else None
        source = requests.__aiter__() if requests is not None else None
        inner = self._method.start(self._inner, source, options)
        return StreamUnaryCall(inner, self._method, requests)


class StreamStream(_Callable, grpc.aio.StreamStreamMultiCallable[Any, Any]):
    """Makes calls that stream both ways."""

    def __call__(
        self,
        request_iterator: Any = None,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        """Start the call; without an iterator, `write()` the requests."""
        options = self._method.options(
            timeout,
            {
                "metadata": metadata,
                "credentials": credentials,
                "wait_for_ready": wait_for_ready,
                "compression": compression,
            },
            unary=False,
        )
        requests = _Requests(request_iterator) if request_iterator is not None else None
        source = requests.__aiter__() if requests is not None else None
        inner = self._method.start(self._inner, source, options)
        return StreamStreamCall(inner, self._method, requests)
