"""What publishers and receivers measure. Times in seconds, sizes in bytes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

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
        self.payload_share = meter.create_histogram(
            "weight_sync.payload.share",
            unit="1",
            description="Payload bytes of a version as a share of the model's, by codec.",
        )
        self.changed_share = meter.create_histogram(
            "weight_sync.changed.share",
            unit="1",
            description="Share of the model's elements that a version changed, from a sample.",
        )
        self.step_s = meter.create_histogram(
            "weight_sync.step.duration",
            unit="s",
            description="Parts of publishing (encode, which writes too, and remember, the copy for "
            "the next delta) and of preparing (fetch, decode, verify).",
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
        self.transfer_s = meter.create_histogram(
            "weight_sync.transfer.duration",
            unit="s",
            description="Bringing one payload file to a receiver's host, by transport.",
        )
        self.verify_s = meter.create_histogram(
            "weight_sync.verify.duration",
            unit="s",
            description="The part of a pause in which an engine's own weights are proven.",
        )
        self.load_s = meter.create_histogram(
            "weight_sync.load.duration",
            unit="s",
            description="The part of a pause in which the engine loads.",
        )
        self.last_receiver_s = meter.create_histogram(
            "weight_sync.last_receiver.duration",
            unit="s",
            description="From a version's announcement until every live engine holds it.",
        )
        self.versions_behind = meter.create_gauge(
            "weight_sync.versions_behind",
            unit="{version}",
            description="Versions announced since the one an engine holds.",
        )
        self.failures = meter.create_counter(
            "weight_sync.failures", description="Failed preparations and activations."
        )

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Record how long a part of publishing or preparing takes, unless it fails."""
        began_s = time.perf_counter()
        yield
        self.step_s.record(time.perf_counter() - began_s, {"step": step})


def tracer() -> trace.Tracer:
    """Return this package's tracer."""
    return telemetry.tracer(NAME)
