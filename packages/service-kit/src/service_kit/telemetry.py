"""Traces and metrics: the OpenTelemetry API always, SDK and exporters only when asked for.

Without an endpoint nothing is installed, no call is wrapped and no thread starts. With one, and
with the `otel` extra, spans and metrics go out over OTLP/gRPC from a bounded queue; a collector
that does not answer costs one line in the log, dropped spans and at most 2 s at the end.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping

import pydantic
from opentelemetry import context as otel_context
from opentelemetry import metrics, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service_kit.config import Config
from service_kit.errors import StartupError

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
SHUTDOWN_TIMEOUT_S = 2.0

_propagator = TraceContextTextMapPropagator()


class TelemetryConfig(Config):
    """Where spans and metrics go, and how much of them is kept."""

    enabled: bool = True
    """False switches telemetry off, whatever the environment says."""

    endpoint: str | None = None
    """OTLP/gRPC collector, such as `http://127.0.0.1:4317`; `https` uses TLS. By default the
    variable OTEL_EXPORTER_OTLP_ENDPOINT; with neither, telemetry is off."""

    headers: dict[str, pydantic.SecretStr] = pydantic.Field(default_factory=dict)
    """Metadata to send to the collector. Keys in lower case."""

    resource: dict[str, str] = pydantic.Field(default_factory=dict)
    """More resource attributes, such as `deployment.environment.name`."""

    sample_ratio: float = pydantic.Field(default=1.0, ge=0, le=1)
    """Share of new traces that is kept; a trace begun elsewhere keeps its caller's decision."""

    span_delay_s: float = pydantic.Field(default=1.0, gt=0)
    """Longest time a finished span waits for company."""

    metric_interval_s: float = pydantic.Field(default=15.0, gt=0)
    """Time between exports of metrics."""

    queue_spans: int = pydantic.Field(default=8192, ge=1)
    """Finished spans held in memory; more are dropped and counted."""

    batch_spans: int = pydantic.Field(default=512, ge=1)
    """Spans in one export."""

    export_timeout_s: float = pydantic.Field(default=2.0, gt=0)
    """Longest time for one export, its retries included."""

    @pydantic.field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str | None) -> str | None:
        scheme = (endpoint or "").partition("://")[0] if "://" in (endpoint or "") else "http"
        if endpoint is not None and (not endpoint or scheme not in {"http", "https"}):
            raise ValueError("expected http://host:4317 or https://host:4317 (OTLP over gRPC)")
        return endpoint


class Telemetry:
    """The providers of a process, or ones that do nothing.

    Args:
        tracer_provider: Makes tracers.
        meter_provider: Makes meters.
        enabled: Whether anything is recorded; calls are wrapped only then.
        shutdown: Flushes and stops within 2 s.
    """

    def __init__(
        self,
        tracer_provider: trace.TracerProvider,
        meter_provider: metrics.MeterProvider,
        *,
        enabled: bool,
        shutdown: Callable[[float], None] | None = None,
    ) -> None:
        self.tracer_provider = tracer_provider
        self.meter_provider = meter_provider
        self.enabled = enabled
        self._shutdown = shutdown

    @classmethod
    def off(cls) -> Telemetry:
        """Return telemetry that does nothing."""
        return cls(trace.NoOpTracerProvider(), metrics.NoOpMeterProvider(), enabled=False)

    def tracer(self, name: str) -> trace.Tracer:
        """Return the tracer of an instrumented package."""
        return self.tracer_provider.get_tracer(name)

    def meter(self, name: str) -> metrics.Meter:
        """Return the meter of an instrumented package."""
        return self.meter_provider.get_meter(name)

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Send what is queued and stop, within `timeout_s`. Repeatable. Blocks: call it last."""
        if self._shutdown is not None:
            shutdown, self._shutdown = self._shutdown, None
            shutdown(timeout_s)


_installed: Telemetry | None = None


def setup_telemetry(
    config: TelemetryConfig,
    service_name: str,
    *,
    environ: Mapping[str, str] = os.environ,
    install: bool = True,
) -> Telemetry:
    """Start telemetry for this process if it is configured.

    Args:
        config: Where to and how much.
        service_name: `service.name` of the resource, such as `sandbox-client`.
        environ: Read for OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_SDK_DISABLED.
        install: Make it the process's own: `tracer`, `meter`, servers and channels then use it.

    Returns:
        Telemetry whose `shutdown` the caller owes at the end.

    Raises:
        StartupError: If `config.endpoint` is set and the `otel` extra is not installed.
    """
    endpoint = config.endpoint or environ.get(ENDPOINT_VARIABLE) or None
    disabled = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    made = Telemetry.off()
    if config.enabled and endpoint and not disabled:
        if _sdk_installed():
            # Imported here alone: the SDK and its exporter cost a quarter of a second.
            from service_kit._otel_sdk import start_sdk

            made = start_sdk(config, endpoint, service_name)
        elif config.endpoint:
            raise StartupError(
                "telemetry.endpoint is set, but the OpenTelemetry SDK is not installed; "
                "install tailrace-service-kit[otel] or unset the endpoint"
            )
        else:
            logger.warning(
                "%s is set, but the OpenTelemetry SDK is not installed: telemetry stays off; "
                "install tailrace-service-kit[otel] for it",
                ENDPOINT_VARIABLE,
            )
    if install:
        _install(made)
    return made


def _sdk_installed() -> bool:
    try:
        return (
            importlib.util.find_spec("opentelemetry.sdk") is not None
            and importlib.util.find_spec("opentelemetry.exporter.otlp.proto.grpc") is not None
        )
    except ModuleNotFoundError:
        return False


def _install(telemetry: Telemetry) -> None:
    global _installed
    _installed = telemetry if telemetry.enabled else None
    if telemetry.enabled and isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        # Instruments made before, or by other libraries, come alive too.
        trace.set_tracer_provider(telemetry.tracer_provider)
        metrics.set_meter_provider(telemetry.meter_provider)


def active_telemetry() -> Telemetry | None:
    """Return what this process records to, or None if it records nothing.

    That is what `setup_telemetry` installed, or else providers that an embedding program has set.
    """
    if _installed is not None:
        return _installed
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return Telemetry(provider, metrics.get_meter_provider(), enabled=True)


def tracer(name: str) -> trace.Tracer:
    """Return the tracer of a package; its spans cost next to nothing while telemetry is off."""
    return _installed.tracer(name) if _installed is not None else trace.get_tracer(name)


def meter(name: str) -> metrics.Meter:
    """Return the meter of a package. Ask after `setup_telemetry`, or it follows the global one."""
    return _installed.meter(name) if _installed is not None else metrics.get_meter(name)


def current_traceparent() -> str:
    """Return the active span as W3C `traceparent`, to put into a message; empty without one."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier.get("traceparent", "")


def parent_context(traceparent: str) -> otel_context.Context:
    """Return a context whose active span is the remote one, for `start_span(context=...)`.

    An empty or malformed text gives a context without a span: the trace then starts anew.
    """
    return _propagator.extract({"traceparent": traceparent}, context=otel_context.Context())


def span_link(traceparent: str) -> list[trace.Link]:
    """Return the link to a remote span as a list for `start_span(links=...)`, empty if invalid."""
    remote = trace.get_current_span(parent_context(traceparent)).get_span_context()
    return [trace.Link(remote)] if remote.is_valid else []
