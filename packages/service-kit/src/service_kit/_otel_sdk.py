"""The SDK behind `setup_telemetry`; imported only when telemetry is on."""

from __future__ import annotations

import collections
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import metrics
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from service_kit.telemetry import Telemetry, TelemetryConfig

logger = logging.getLogger("service_kit.telemetry")

_COMPLAIN_EVERY_S = 600.0
# What the SDK would log about a collector that does not answer, several times a minute.
_NOISY_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.sdk.metrics._internal.export",
)


class _Outage:
    """Tells once that the collector does not answer, then seldom, and once that it does again."""

    def __init__(self, endpoint: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._lock = threading.Lock()
        self._told_at: float | None = None
        self.cause = _LastMessage()

    def report(self, *, failed: bool) -> None:
        with self._lock:
            now = self._clock()
            if not failed:
                if self._told_at is not None:
                    logger.info("telemetry: %s answers again", self._endpoint)
                self._told_at = None
                return
            if self._told_at is not None and now - self._told_at < _COMPLAIN_EVERY_S:
                return
            self._told_at = now
        logger.warning(
            "telemetry: cannot export to %s; what does not fit into the queue is dropped until it "
            "answers (%s)",
            self._endpoint,
            self.cause.text or "no further details",
        )


class _LastMessage(logging.Filter):
    """Keeps a logger's last message and lets none of them through."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.text = record.getMessage()
        return False


class BoundedSpanProcessor(SpanProcessor):
    """Exports finished spans in batches from a thread of its own.

    The queue is bounded: what does not fit is dropped and counted, as is what could not be sent.
    `shutdown` is bounded too, which the SDK's own processor is not.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        queue_spans: int,
        batch_spans: int,
        delay_s: float,
        dropped: metrics.Counter,
    ) -> None:
        self._exporter = exporter
        self._queue: collections.deque[ReadableSpan] = collections.deque()
        self._queue_spans = queue_spans
        self._batch_spans = min(batch_spans, queue_spans)
        self._delay_s = delay_s
        self._dropped = dropped
        self._stopping = False
        self._wake = threading.Event()
        self._export_lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="span-export", daemon=True)
        self._thread.start()

    def on_start(self, span: Span, parent_context: otel_context.Context | None = None) -> None:
        """Do nothing: only finished spans are sent."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a finished span, or drop it if the queue is full."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._stopping or len(self._queue) >= self._queue_spans:
            self._dropped.add(1, {"reason": "queue_full"})
            return
        self._queue.append(span)
        if len(self._queue) >= self._batch_spans:
            self._wake.set()

    def _work(self) -> None:
        while not self._stopping:
            self._wake.wait(self._delay_s)
            self._wake.clear()
            self._export_queued()
        self._export_queued()

    def _export_queued(self) -> None:
        with self._export_lock:
            while self._queue:
                count = min(len(self._queue), self._batch_spans)
                batch = [self._queue.popleft() for _ in range(count)]
                if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
                    self._dropped.add(len(batch), {"reason": "export_failed"})
                    return

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Export what is queued now; False if some of it is still there."""
        self._export_queued()
        return not self._queue

    def shutdown(self) -> None:
        """Stop without a last export of more than an instant."""
        self.stop(0.1)

    def stop(self, timeout_s: float) -> None:
        """Export what is queued and end, within `timeout_s`."""
        if self._stopping:
            return
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)
        # Closes the connection, which ends an export that still hangs.
        self._exporter.shutdown()


class _WatchedSpanExporter(SpanExporter):
    def __init__(self, inner: SpanExporter, outage: _Outage) -> None:
        self._inner = inner
        self._outage = outage

    def export(self, spans: Any) -> SpanExportResult:
        try:
            result = self._inner.export(spans)
        except Exception as error:
            self._outage.cause.text = repr(error)
            result = SpanExportResult.FAILURE
        self._outage.report(failed=result is not SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)


class _WatchedMetricExporter(MetricExporter):
    def __init__(self, inner: MetricExporter, outage: _Outage) -> None:
        super().__init__()
        self._inner = inner
        self._outage = outage

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        try:
            result = self._inner.export(metrics_data, timeout_millis=timeout_millis, **kwargs)
        except Exception as error:
            self._outage.cause.text = repr(error)
            result = MetricExportResult.FAILURE
        self._outage.report(failed=result is not MetricExportResult.SUCCESS)
        return result

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return self._inner.force_flush(timeout_millis=timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        self._inner.shutdown(timeout_millis=timeout_millis)


def start_sdk(config: TelemetryConfig, endpoint: str, service_name: str) -> Telemetry:
    """Build providers that export to `endpoint`, and start their threads."""
    outage = _Outage(endpoint)
    for name in _NOISY_LOGGERS:
        _redirect(logging.getLogger(name), outage.cause)
    resource = Resource.create(
        {
            "service.name": service_name,
            "service.namespace": "tailrace",
            "service.instance.id": str(uuid.uuid4()),
            "host.name": socket.gethostname(),
            "process.pid": os.getpid(),
            **config.resource,
        }
    )
    options: dict[str, Any] = {
        "endpoint": endpoint,
        "insecure": not endpoint.startswith("https://"),
        "headers": tuple((k, v.get_secret_value()) for k, v in config.headers.items()) or None,
        "timeout": config.export_timeout_s,
    }
    reader = PeriodicExportingMetricReader(
        _WatchedMetricExporter(OTLPMetricExporter(**options), outage),
        export_interval_millis=config.metric_interval_s * 1000,
        export_timeout_millis=config.export_timeout_s * 1000,
    )
    meters = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
    dropped = meters.get_meter("service_kit").create_counter(
        "tailrace.telemetry.spans.dropped", unit="{span}", description="Spans never exported."
    )
    processor = BoundedSpanProcessor(
        _WatchedSpanExporter(OTLPSpanExporter(**options), outage),
        queue_spans=config.queue_spans,
        batch_spans=config.batch_spans,
        delay_s=config.span_delay_s,
        dropped=dropped,
    )
    tracers = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
        resource=resource,
        shutdown_on_exit=False,
    )
    tracers.add_span_processor(processor)

    def shutdown(timeout_s: float) -> None:
        _run_all(
            [
                lambda: processor.stop(timeout_s * 0.75),
                lambda: meters.shutdown(timeout_millis=timeout_s * 750),
            ],
            timeout_s,
        )

    return Telemetry(tracers, meters, enabled=True, shutdown=shutdown)


def _redirect(noisy: logging.Logger, to: _LastMessage) -> None:
    for old in [known for known in noisy.filters if isinstance(known, _LastMessage)]:
        noisy.removeFilter(old)
    # In front of the SDK's own filter against duplicates, which would withhold messages.
    noisy.filters.insert(0, to)


def _run_all(work: Iterable[Callable[[], None]], timeout_s: float) -> None:
    """Run the steps side by side and wait for them no longer than `timeout_s`."""
    ends = time.monotonic() + timeout_s
    # Daemons: an exporter that hangs in a system call must not keep the process.
    threads = [threading.Thread(target=step, daemon=True) for step in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))
