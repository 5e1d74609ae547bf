from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from service_kit import telemetry
from service_kit.channel import ChannelConfig, open_channel
from weight_sync import PublishConfig, Publisher, WeightClient
from weight_sync.config import ReceiverConfig, StaticEngine, WeightSyncConfig
from weight_sync.testing import FakeEngine


async def test_an_update_belongs_to_the_trace_of_the_step_that_made_it(
    config: WeightSyncConfig,
    run_service: Any,
    engine: FakeEngine,
    weights: Callable[[int], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    spans = TracerProvider()
    spans.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "tracer", spans.get_tracer)
    monkeypatch.setattr(telemetry, "meter", MeterProvider([reader]).get_meter)
    receiver = ReceiverConfig(
        host="host", engines=(StaticEngine(url=engine.url),), poll_interval_s=0.02
    )
    config = config.model_copy(update={"receiver": receiver})
    async with (
        run_service(config) as service,
        open_channel(ChannelConfig(target=service.address)) as channel,
    ):
        deltas = PublishConfig(codec="ulp-gap")
        publisher = await Publisher.acquire(channel, run="run", config=deltas)
        with spans.get_tracer("trainer").start_as_current_span("optimizer step") as step:
            version = await publisher.publish(weights(1), step=1)
        assert (
            await WeightClient(channel).await_version(version.number, timeout_s=10)
        ).engines == 1
        await publisher.publish(weights(2), step=2)
    found = {span.name: span for span in reversed(exporter.get_finished_spans())}  # the first
    publish, update = found["weight_sync.publish"], found["weight_sync.update"]
    assert publish.parent is not None
    assert publish.parent.span_id == step.get_span_context().span_id
    assert update.parent is not None
    assert publish.context is not None
    assert update.parent.span_id == publish.context.span_id
    assert (update.attributes or {})["weight_sync.version"] == version.number
    data = reader.get_metrics_data()
    assert data is not None
    metrics = {
        metric.name: metric
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    share: Any
    (share,) = metrics["weight_sync.changed.share"].data.data_points
    changed = np.mean([np.mean(a != weights(1)[n]) for n, a in weights(2).items()])
    assert share.sum == pytest.approx(changed, rel=0.5)
    assert metrics.keys() >= {
        "weight_sync.published",
        "weight_sync.publish.duration",
        "weight_sync.payload.share",
        "weight_sync.step.duration",
        "weight_sync.prepare.duration",
        "weight_sync.activate.duration",
        "weight_sync.pause.duration",
        "weight_sync.load.duration",
        "weight_sync.verify.duration",
        "weight_sync.transfer.duration",
        "weight_sync.last_receiver.duration",
        "weight_sync.versions_behind",
    }
