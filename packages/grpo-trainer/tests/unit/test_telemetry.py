from __future__ import annotations

from pathlib import Path

import pytest
from grpo_trainer import telemetry
from grpo_trainer.stage import StageState
from grpo_trainer.testing.lives import World, game_recipe
from grpo_trainer.testing.models import DENSE, write_model
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "tracer", provider.get_tracer)
    return exporter


def identity(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


async def test_every_trained_group_has_one_trace_from_assignment_to_optimizer_step(
    tmp_path: Path, exporter: InMemorySpanExporter
) -> None:
    world = World(tmp_path / "run", write_model(tmp_path / "model", DENSE, scale=0.02))
    life = world.life(game_recipe(steps=3))
    assert await life.run() is StageState.FINISHED
    spans = exporter.get_finished_spans()
    groups = {identity(span): span for span in spans if span.name == "group"}
    steps = [span for span in spans if span.name == "grpo.step"]
    assert len(steps) == 6
    for step in steps:
        assert step.parent is not None
        group = groups[step.parent.trace_id, step.parent.span_id]
        assert group.attributes is not None
        assert group.attributes["decision"] == "TRAINED"
        assert step.attributes is not None
        assert step.attributes["version.number"] == int(str(step.attributes["step"])) + 1
    # Engines get the same trace to hang their attempts on.
    traces = {a.traceparent.split("-")[1] for _, a in life.engines.assigned}
    assert traces == {f"{trace:032x}" for trace, _ in groups}
    assert len(traces) == len(groups)


async def test_without_a_collector_there_is_no_traceparent(tmp_path: Path) -> None:
    world = World(tmp_path / "run", write_model(tmp_path / "model", DENSE, scale=0.02))
    life = world.life(game_recipe(steps=1))
    await life.run()
    assert {a.traceparent for _, a in life.engines.assigned} == {""}
