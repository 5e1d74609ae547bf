"""One attempt is one connected trace under the span of whoever assigned it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import service_kit.telemetry
from opentelemetry import metrics
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from rollout_engine.client import GroupConsumer
from rollout_engine.config import RefillConfig, WorkConfig
from rollout_engine.testing import MemoryEngine, ScriptTurn
from rollout_engine.types import Assignment, FinishedGroup, GroupKey, Purpose
from service_kit.errors import Reason, ServiceError
from service_kit.telemetry import Telemetry, current_traceparent, tracer

CONFIG = WorkConfig(refills=RefillConfig(backoff_initial_s=0.001, backoff_max_s=0.01))


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry(provider, metrics.NoOpMeterProvider(), enabled=True)
    monkeypatch.setattr(service_kit.telemetry, "_installed", telemetry)
    return exporter


def script(turn: ScriptTurn) -> str:
    return ("write answer t", "submit")[turn.number]


async def run_group(engine: MemoryEngine, traceparent: str) -> FinishedGroup:
    async with engine.channel() as channel:
        consumer = GroupConsumer(channel, consumer_id="me", purpose=Purpose.TRAINING, incarnation=1)
        connection = asyncio.create_task(consumer.run())
        await consumer.assign(Assignment(GroupKey("g", 0), "t", 1, traceparent=traceparent))
        async with asyncio.timeout(20):
            finished = await consumer.next_finished()
        connection.cancel()
        await asyncio.gather(connection, return_exceptions=True)
        return finished


async def test_an_attempts_spans_hang_together_under_the_group(
    tmp_path: Path, exported: InMemorySpanExporter
) -> None:
    failed = False

    async def hook(kind: str, name: str) -> None:
        nonlocal failed
        if kind == "grade" and not failed:
            failed = True
            raise ServiceError("no", reason=Reason.INTERNAL)

    with tracer("test").start_as_current_span("group") as group:
        traceparent = current_traceparent()
    async with MemoryEngine(tmp_path, script, CONFIG, hook) as engine:
        finished = await run_group(engine, traceparent)

    spans = [s for s in exported.get_finished_spans() if "tailrace." not in s.name]
    own = [s for s in spans if s.context.trace_id == group.get_span_context().trace_id]
    by_id = {s.context.span_id: s for s in own}

    def path(span: ReadableSpan) -> str:
        parent = None if span.parent is None else by_id.get(span.parent.span_id)
        return span.name if parent is None else f"{path(parent)}/{span.name}"

    paths = sorted(path(span) for span in own)
    once = [
        "group/attempt",
        "group/attempt/grade",
        "group/attempt/sandbox.create",
        "group/attempt/turn",
        "group/attempt/turn",
        "group/attempt/turn/generate",
        "group/attempt/turn/generate",
        "group/attempt/turn/tool",
    ]
    assert paths == sorted(["group", *once, *once])

    attempts = sorted((s for s in own if s.name == "attempt"), key=lambda s: s.start_time or 0)
    assert [s.status.status_code for s in attempts] == [StatusCode.ERROR, StatusCode.UNSET]
    first, second = (dict(s.attributes or {}) for s in attempts)
    assert (first["outcome"], first["fault.stage"]) == ("FAULT", "GRADE")
    assert (second["outcome"], second["reward"], second["turns"]) == ("SOLVED", 1.0, 2)
    assert finished.attempts[0].traceparent.split("-")[2] == f"{attempts[1].context.span_id:016x}"


async def test_without_telemetry_an_attempt_carries_no_trace(tmp_path: Path) -> None:
    async with MemoryEngine(tmp_path, script, CONFIG) as engine:
        finished = await run_group(engine, "")
    assert finished.attempts[0].traceparent == ""
