"""What publishers and receivers measure. Times in seconds, sizes in bytes."""

from opentelemetry import trace
from service_kit import telemetry

NAME = "weight_sync"


class Instruments:
    """The metrics of this package; make one after `setup_telemetry`."""

    def __init__(self) -> None:
        meter = telemetry.meter(NAME)
        self.published_bytes = meter.create_counter(
            "weight_sync.published", unit="By", description="Payload bytes written by publishers."
        )
        self.fetched_bytes = meter.create_counter(
            "weight_sync.fetched", unit="By", description="Payload bytes copied by receivers."
        )
        self.publish_s = meter.create_histogram(
            "weight_sync.publish.duration",
            unit="s",
            description="From the tensors to the announced version.",
        )
        self.prepare_s = meter.create_histogram(
            "weight_sync.prepare.duration",
            unit="s",
            description="Fetching and verifying a shadow copy while the engines serve.",
        )
        self.activate_s = meter.create_histogram(
            "weight_sync.activate.duration",
            unit="s",
            description="Bringing one engine from its old version to a verified new one.",
        )
        self.pause_s = meter.create_histogram(
            "weight_sync.pause.duration",
            unit="s",
            description="The part of an activation in which the engine generates nothing.",
        )
        self.versions_behind = meter.create_gauge(
            "weight_sync.versions_behind",
            unit="{version}",
            description="Versions announced since the one an engine holds.",
        )
        self.failures = meter.create_counter(
            "weight_sync.failures", description="Failed preparations and activations."
        )


def tracer() -> trace.Tracer:
    """Return this package's tracer."""
    return telemetry.tracer(NAME)
