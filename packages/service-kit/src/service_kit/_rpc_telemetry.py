"""Spans and metrics of calls, by OpenTelemetry's RPC conventions (`rpc.*`, stable since 1.45).

A span ends in every case: response, error, deadline, cancellation, or a stream that is dropped.
Its status is the call's real one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

import grpc
from opentelemetry import context as otel_context
from opentelemetry import metrics, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service_kit.addresses import is_unix, split_host_port
from service_kit.telemetry import Telemetry

CORE_FAILURE = "Internal error from Core"
"""What grpc.aio gives as details when an operation of its core fails, as a write does when the
server has ended the call. The call's real status, with another call of the callbacks, follows."""

_REAL_STATUS_WAIT_S = 2.0
_SCOPE = "service_kit"
_BUCKETS_S = [0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10]
# A caller's mistake is not the server's error.
_SERVER_ERRORS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_propagator = TraceContextTextMapPropagator()

Attributes = dict[str, str | int]


class _Instruments:
    def __init__(self, telemetry: Telemetry, side: str) -> None:
        self.tracer = telemetry.tracer(_SCOPE)
        self.duration: metrics.Histogram = telemetry.meter(_SCOPE).create_histogram(
            f"rpc.{side}.call.duration",
            unit="s",
            description=f"Duration of calls seen from the {side}.",
            explicit_bucket_boundaries_advisory=_BUCKETS_S,
        )


class ClientTelemetry:
    """Records the calls of one channel."""

    def __init__(self, telemetry: Telemetry, target: str) -> None:
        self._instruments = _Instruments(telemetry, "client")
        self._peer: Attributes = {"server.address": target}
        if not is_unix(target):
            try:
                host, port = split_host_port(target.rsplit("/", 1)[-1])
            except ValueError:
                return
            self._peer = {"server.address": host, "server.port": port}

    def method(self, name: str) -> ClientMethodTelemetry:
        """Return the recorder of one method."""
        return ClientMethodTelemetry(self._instruments, name.lstrip("/"), self._peer)


class ClientMethodTelemetry:
    """Records the calls of one method."""

    def __init__(self, instruments: _Instruments, name: str, peer: Attributes) -> None:
        self._instruments = instruments
        self._name = name
        self._attributes: Attributes = {"rpc.system.name": "grpc", "rpc.method": name, **peer}

    def start(self, call: Callable[..., Any], arguments: Any, options: dict[str, Any]) -> Any:
        """Start the call inside a span of its own and return it."""
        began = time.perf_counter()
        span = self._instruments.tracer.start_span(
            self._name, kind=trace.SpanKind.CLIENT, attributes=self._attributes
        )
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, context=trace.set_span_in_context(span))
        options["metadata"] = (*options["metadata"], *carrier.items())
        recording = _ClientSpan(self._instruments, self._attributes, span, began)
        try:
            started = call(arguments, **options)
        except BaseException as error:
            span.record_exception(error)
            recording.finish(grpc.StatusCode.UNKNOWN, str(error))
            raise
        started.add_done_callback(recording)
        return started


class _ClientSpan:
    """Ends a call's span and records its duration, once."""

    def __init__(
        self, instruments: _Instruments, attributes: Attributes, span: trace.Span, began: float
    ) -> None:
        self._instruments = instruments
        self._attributes = attributes
        self._span = span
        self._began = began
        self._waited = False
        self._finished = False

    def __call__(self, ended: Any) -> None:
        """Take the status of the call that has ended."""
        if self._finished:
            return
        code = _completed(ended.code(), grpc.StatusCode.UNKNOWN)
        details = "" if code is grpc.StatusCode.OK else _completed(ended.details(), "")
        if details == CORE_FAILURE and not self._waited:
            self._waited = True
            asyncio.get_running_loop().call_later(_REAL_STATUS_WAIT_S, self, ended)
            return
        self.finish(code, details)

    def finish(self, code: grpc.StatusCode, details: str | None) -> None:
        """End the span with a status."""
        self._finished = True
        outcome = _outcome(code, failed=code is not grpc.StatusCode.OK)
        self._span.set_attributes(outcome)
        if code is not grpc.StatusCode.OK:
            self._span.set_status(trace.StatusCode.ERROR, details or None)
        self._span.end()
        self._instruments.duration.record(
            time.perf_counter() - self._began,
            {**self._attributes, **outcome},
            context=trace.set_span_in_context(self._span),
        )


def _completed(asking: Coroutine[Any, Any, Any], otherwise: Any) -> Any:
    """Return the result of a coroutine that has no reason to wait, as of a call that is done."""
    try:
        asking.send(None)
    except StopIteration as done:
        return done.value
    asking.close()
    return otherwise


def _outcome(code: grpc.StatusCode, *, failed: bool) -> Attributes:
    outcome: Attributes = {"rpc.response.status_code": code.name}
    if failed:
        outcome["error.type"] = code.name
    return outcome


class ServerTelemetry:
    """Records the calls that a server handles."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._instruments = _Instruments(telemetry, "server")

    def around(
        self, method: str, behavior: Callable[[Any, Any], Awaitable[Any]]
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        """Return the behaviour inside a span that continues the caller's trace."""
        name = method.lstrip("/")
        attributes: Attributes = {"rpc.system.name": "grpc", "rpc.method": name}
        instruments = self._instruments

        async def recorded(request: Any, context: Any) -> Any:
            began = time.perf_counter()
            parent = _propagator.extract(_carrier(context.invocation_metadata() or ()))
            span = instruments.tracer.start_span(
                name, context=parent, kind=trace.SpanKind.SERVER, attributes=attributes
            )
            token = otel_context.attach(trace.set_span_in_context(span, parent))
            code = grpc.StatusCode.UNKNOWN
            budget_s = context.time_remaining()
            try:
                response = await behavior(request, context)
                code = _code_of(context)
                return response
            except grpc.aio.AbortError:
                code = _code_of(context)
                raise
            except asyncio.CancelledError:
                expired = _has_expired(context.time_remaining(), budget_s)
                code = grpc.StatusCode.DEADLINE_EXCEEDED if expired else grpc.StatusCode.CANCELLED
                raise
            finally:
                otel_context.detach(token)
                failed = code in _SERVER_ERRORS
                outcome = _outcome(code, failed=failed)
                span.set_attributes(outcome)
                if failed:
                    span.set_status(trace.StatusCode.ERROR, context.details() or None)
                span.end()
                instruments.duration.record(
                    time.perf_counter() - began,
                    {**attributes, **outcome},
                    context=trace.set_span_in_context(span),
                )

        return recorded


def _has_expired(left_s: float | None, budget_s: float | None) -> bool:
    """Tell whether a cancelled call ran out of time.

    gRPC rounds timeouts up on the wire, by as much as 1 %: the client's reset, sent at its own
    deadline, comes before the server's deadline.
    """
    if left_s is None or budget_s is None:
        return False
    return left_s <= 0.02 + 0.02 * budget_s


def _carrier(metadata: Iterable[tuple[str, Any]]) -> dict[str, str]:
    return {key: value for key, value in metadata if key in {"traceparent", "tracestate"}}


def _code_of(context: Any) -> grpc.StatusCode:
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code
    return _CODES.get(code or 0, grpc.StatusCode.UNKNOWN)
