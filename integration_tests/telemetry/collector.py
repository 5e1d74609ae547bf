"""A collector in the test's own process: OTLP over gRPC in, spans by trace out."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue


@dataclass(frozen=True)
class Span:
    """A finished span as it came in."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    service: str
    name: str
    start_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, Any] = field(hash=False)


def attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    """Values of plain kinds by key."""
    found = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        found[pair.key] = getattr(pair.value, kind) if kind else None
    return found


class Trace:
    """The spans of one trace."""

    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans
        self._by_id = {span.span_id: span for span in spans}

    @property
    def roots(self) -> list[Span]:
        """Spans without a parent."""
        return [span for span in self.spans if not span.parent_id]

    @property
    def orphans(self) -> list[Span]:
        """Spans whose parent never came in."""
        return [s for s in self.spans if s.parent_id and s.parent_id not in self._by_id]

    def named(self, name: str) -> list[Span]:
        """Spans of a name."""
        return [span for span in self.spans if span.name == name]

    def children(self, parent: Span) -> list[Span]:
        """Spans right below one, oldest first."""
        below = [span for span in self.spans if span.parent_id == parent.span_id]
        return sorted(below, key=lambda span: span.start_ns)

    def below(self, parent: Span) -> list[Span]:
        """All spans below one."""
        found = []
        for child in self.children(parent):
            found += [child, *self.below(child)]
        return found

    def path(self, span: Span) -> str:
        """Names from the root down, each with its service."""
        step = f"{span.service}:{span.name}"
        parent = self._by_id.get(span.parent_id)
        return step if parent is None else f"{self.path(parent)} > {step}"


class Collector:
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.metrics: set[tuple[str, str]] = set()
        """Service and name."""

    def traces(self) -> list[Trace]:
        """All spans, by trace."""
        by_trace: dict[bytes, list[Span]] = {}
        for span in self.spans:
            by_trace.setdefault(span.trace_id, []).append(span)
        return [Trace(spans) for spans in by_trace.values()]


class _Spans(trace_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    async def Export(  # noqa: N802
        self, request: trace_pb.ExportTraceServiceRequest, context: Any
    ) -> trace_pb.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            service = attributes(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self._collector.spans += [
                    Span(
                        trace_id=span.trace_id,
                        span_id=span.span_id,
                        parent_id=span.parent_span_id,
                        service=service,
                        name=span.name,
                        start_ns=span.start_time_unix_nano,
                        end_ns=span.end_time_unix_nano,
                        failed=span.status.code == span.status.STATUS_CODE_ERROR,
                        attributes=attributes(span.attributes),
                    )
                    for span in scope.spans
                ]
        return trace_pb.ExportTraceServiceResponse()


class _Metrics(metrics_grpc.MetricsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    async def Export(  # noqa: N802
        self, request: metrics_pb.ExportMetricsServiceRequest, context: Any
    ) -> metrics_pb.ExportMetricsServiceResponse:
        for resource in request.resource_metrics:
            service = attributes(resource.resource.attributes)["service.name"]
            for scope in resource.scope_metrics:
                self._collector.metrics |= {(service, metric.name) for metric in scope.metrics}
        return metrics_pb.ExportMetricsServiceResponse()


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    """A collector that listens, and its endpoint."""
    collector = Collector()
    server = grpc.aio.server()
    trace_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]
        _Spans(collector), server
    )
    metrics_grpc.add_MetricsServiceServicer_to_server(  # type: ignore[no-untyped-call]
        _Metrics(collector), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(1)
