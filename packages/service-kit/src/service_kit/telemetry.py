"""Traces and metrics: the OpenTelemetry API always, SDK and exporters only when asked for."""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry import metrics, trace


@dataclass(frozen=True)
class Telemetry:
    """Where spans and metrics of this process go."""

    enabled: bool
    tracer_provider: trace.TracerProvider
    meter_provider: metrics.MeterProvider
