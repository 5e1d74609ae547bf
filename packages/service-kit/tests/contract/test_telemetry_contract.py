from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from service_kit import (
    NotFound,
    Server,
    ServiceError,
    Telemetry,
    TelemetryConfig,
    current_traceparent,
    parent_context,
    setup_telemetry,
    span_link,
    wait_until_serving,
)

NAME = "test.v1.EchoService"
ECHO = f"{NAME}/Echo"
ERROR = 2  # opentelemetry.proto.trace.v1.Status.STATUS_CODE_ERROR
SERVER, CLIENT = 2, 3  # opentelemetry.proto.trace.v1.Span.SpanKind


class Collector:
    """An OTLP/gRPC collector that keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.metrics: dict[str, Any] = {}
        self.resource: dict[str, str] = {}
        self.headers: dict[str, Any] = {}
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        collector = self

        class Traces(trace_service_pb2_grpc.TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:
                collector.headers = dict(context.invocation_metadata())
                for resource in request.resource_spans:
                    collector.resource = _attributes(resource.resource)
                    for scope in resource.scope_spans:
                        collector.spans.extend(scope.spans)
                return trace_service_pb2.ExportTraceServiceResponse()

        class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:
                for resource in request.resource_metrics:
                    for scope in resource.scope_metrics:
                        collector.metrics.update({m.name: m for m in scope.metrics})
                return metrics_service_pb2.ExportMetricsServiceResponse()

        add_traces: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        add_metrics: Any = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server
        add_traces(Traces(), self._server)
        add_metrics(Metrics(), self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    def named(self, name: str, kind: int | None = None) -> list[Any]:
        return [s for s in self.spans if s.name == name and kind in {None, s.kind}]


def _attributes(holder: Any) -> dict[str, Any]:
    return {
        item.key: getattr(item.value, item.value.WhichOneof("value")) for item in holder.attributes
    }


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    made.start()
    yield made
    made.stop()


@pytest.fixture
def telemetry(collector: Collector) -> Iterator[Telemetry]:
    config = TelemetryConfig.model_validate(
        {"endpoint": collector.endpoint, "headers": {"x-key": "k"}, "resource": {"run": "r1"}}
    )
    made = setup_telemetry(config, "echo-test", environ={}, install=False)
    yield made
    made.shutdown()


async def _flushed(telemetry: Telemetry, server: Server | None = None) -> None:
    if server is not None:
        await server.drain()  # a client may have its answer before the handler's span has ended
    await asyncio.to_thread(telemetry.shutdown)


async def test_a_call_is_one_trace_from_the_callers_span_to_the_handlers(
    stack: Any, telemetry: Telemetry, collector: Collector
) -> None:
    async def on_unary(request: bytes, context: Any) -> bytes:
        with telemetry.tracer("test").start_as_current_span("work"):
            return current_traceparent().encode()

    stack.echo.on_unary = on_unary
    server = await stack.serve(telemetry=telemetry)
    stub = await stack.stub(server.address, telemetry=telemetry)
    with telemetry.tracer("test").start_as_current_span("caller"):
        inner = await stub.echo(b"", timeout=20)
    await _flushed(telemetry, server)

    (caller,) = collector.named("caller")
    (client,) = collector.named(ECHO, CLIENT)
    (served,) = collector.named(ECHO, SERVER)
    (work,) = collector.named("work")
    assert client.parent_span_id == caller.span_id
    assert served.parent_span_id == client.span_id
    assert work.parent_span_id == served.span_id
    assert len({span.trace_id for span in (caller, client, served, work)}) == 1
    assert inner.decode().startswith(f"00-{work.trace_id.hex()}-{work.span_id.hex()}-")

    port = int(server.address.rpartition(":")[2])
    assert _attributes(client) == {
        "rpc.system.name": "grpc",
        "rpc.method": ECHO,
        "rpc.response.status_code": "OK",
        "server.address": "127.0.0.1",
        "server.port": port,
    }
    assert _attributes(served) == {
        "rpc.system.name": "grpc",
        "rpc.method": ECHO,
        "rpc.response.status_code": "OK",
    }
    assert collector.resource["service.name"] == "echo-test"
    assert collector.resource["run"] == "r1"
    assert collector.headers["x-key"] == "k"


async def test_durations_are_histograms_by_method_and_status(
    stack: Any, telemetry: Telemetry, collector: Collector
) -> None:
    server = await stack.serve(telemetry=telemetry)
    stub = await stack.stub(server.address, telemetry=telemetry)
    for _ in range(3):
        await stub.echo(b"", timeout=20)
    await _flushed(telemetry, server)
    for side in ("client", "server"):
        metric = collector.metrics[f"rpc.{side}.call.duration"]
        (point,) = metric.histogram.data_points
        assert metric.unit == "s"
        assert point.count == 3
        assert point.sum > 0
        assert _attributes(point)["rpc.method"] == ECHO
        assert _attributes(point)["rpc.response.status_code"] == "OK"
        assert min(point.explicit_bounds) == 0.005


async def test_a_refusal_is_an_error_to_the_client_and_none_of_the_servers(
    stack: Any, telemetry: Telemetry, collector: Collector
) -> None:
    async def on_unary(request: bytes, context: Any) -> bytes:
        raise NotFound("no such task")

    stack.echo.on_unary = on_unary
    server = await stack.serve(telemetry=telemetry)
    stub = await stack.stub(server.address, telemetry=telemetry)
    with pytest.raises(NotFound):
        await stub.echo(b"", timeout=20)
    await _flushed(telemetry, server)
    (client,) = collector.named(ECHO, CLIENT)
    (served,) = collector.named(ECHO, SERVER)
    assert client.status.code == ERROR
    assert client.status.message == "no such task"
    assert _attributes(client)["error.type"] == "NOT_FOUND"
    assert served.status.code != ERROR
    assert _attributes(served)["rpc.response.status_code"] == "NOT_FOUND"
    assert "error.type" not in _attributes(served)


async def test_a_failing_handler_is_an_error_with_its_exception_once(
    stack: Any, telemetry: Telemetry, collector: Collector
) -> None:
    async def on_unary(request: bytes, context: Any) -> bytes:
        raise KeyError("bug")

    stack.echo.on_unary = on_unary
    server = await stack.serve(telemetry=telemetry)
    stub = await stack.stub(server.address, telemetry=telemetry)
    with pytest.raises(ServiceError):
        await stub.echo(b"", timeout=20)
    await _flushed(telemetry, server)
    (served,) = collector.named(ECHO, SERVER)
    assert served.status.code == ERROR
    assert _attributes(served)["rpc.response.status_code"] == "INTERNAL"
    assert [event.name for event in served.events] == ["exception"]


async def test_a_cancelled_call_reaches_the_server_and_ends_both_spans(
    stack: Any, telemetry: Telemetry, collector: Collector
) -> None:
    server = await stack.serve(telemetry=telemetry)
    stub = await stack.stub(server.address, telemetry=telemetry)

    async def call() -> None:
        await stub.hang(b"", timeout=60)

    task = asyncio.create_task(call())
    await stack.echo.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(stack.echo.cancelled.wait(), 20)
    await _flushed(telemetry, server)
    for kind in (CLIENT, SERVER):
        (span,) = collector.named(f"{NAME}/Hang", kind)
        assert _attributes(span)["rpc.response.status_code"] == "CANCELLED"


async def test_a_passed_deadline_is_one_on_both_sides(
    stack: Any, telemetry: Telemetry, collector: Collector
) -> None:
    server = await stack.serve(telemetry=telemetry)
    stub = await stack.stub(server.address, telemetry=telemetry)
    with pytest.raises(ServiceError):
        await stub.hang(b"", timeout=0.1)
    await asyncio.wait_for(stack.echo.cancelled.wait(), 20)
    await _flushed(telemetry, server)
    for kind in (CLIENT, SERVER):
        (span,) = collector.named(f"{NAME}/Hang", kind)
        assert _attributes(span)["rpc.response.status_code"] == "DEADLINE_EXCEEDED"
        assert span.status.code == ERROR


async def test_a_dropped_stream_ends_both_spans(
    stack: Any, telemetry: Telemetry, collector: Collector
) -> None:
    server = await stack.serve(telemetry=telemetry)
    stub = await stack.stub(server.address, telemetry=telemetry)

    async def two() -> list[bytes]:
        seen: list[bytes] = []
        async for message in stub.count(b"3+"):
            seen.append(message)
            if len(seen) == 2:
                break
        return seen

    assert await two() == [b"0", b"1"]
    await asyncio.wait_for(stack.echo.cancelled.wait(), 20)
    await _flushed(telemetry, server)
    for kind in (CLIENT, SERVER):
        (span,) = collector.named(f"{NAME}/Count", kind)
        assert _attributes(span)["rpc.response.status_code"] == "CANCELLED"


async def test_streams_of_all_kinds_are_recorded(
    stack: Any, telemetry: Telemetry, collector: Collector
) -> None:
    async def requests() -> AsyncIterator[bytes]:
        yield b"a"

    server = await stack.serve(telemetry=telemetry)
    stub = await stack.stub(server.address, telemetry=telemetry)
    assert await stub.join(requests()) == b"a"
    assert [message async for message in stub.chat(requests())] == [b"A"]
    assert [message async for message in stub.count(b"1")] == [b"0"]
    await _flushed(telemetry, server)
    for method in ("Join", "Chat", "Count"):
        for kind in (CLIENT, SERVER):
            (span,) = collector.named(f"{NAME}/{method}", kind)
            assert _attributes(span)["rpc.response.status_code"] == "OK"


async def test_health_checks_leave_no_spans(
    stack: Any, telemetry: Telemetry, collector: Collector
) -> None:
    server = await stack.serve(telemetry=telemetry)
    channel = await stack.channel(server.address, telemetry=telemetry)
    await wait_until_serving(channel, timeout_s=20)
    await _flushed(telemetry, server)
    assert collector.spans == []


async def test_a_trace_goes_on_from_a_traceparent_in_a_message(
    telemetry: Telemetry, collector: Collector
) -> None:
    tracer = telemetry.tracer("test")
    with tracer.start_as_current_span("sender"):
        sent = current_traceparent()
    assert current_traceparent() == ""
    with tracer.start_as_current_span("child", context=parent_context(sent)):
        pass
    with tracer.start_as_current_span("linked", links=span_link(sent)):
        pass
    with tracer.start_as_current_span("alone", context=parent_context("garbage")):
        pass
    assert span_link("") == []
    await _flushed(telemetry)
    (sender,), (child,), (linked,), (alone,) = map(
        collector.named, ("sender", "child", "linked", "alone")
    )
    assert child.parent_span_id == sender.span_id
    assert linked.links[0].span_id == sender.span_id
    assert linked.trace_id != sender.trace_id
    assert alone.parent_span_id == b""


async def test_a_sample_ratio_of_zero_exports_no_spans(collector: Collector) -> None:
    config = TelemetryConfig(endpoint=collector.endpoint, sample_ratio=0)
    telemetry = setup_telemetry(config, "sampled", environ={}, install=False)
    with telemetry.tracer("test").start_as_current_span("unseen"):
        pass
    await _flushed(telemetry)
    assert collector.spans == []


async def test_spans_beyond_the_queue_are_dropped_and_counted(collector: Collector) -> None:
    config = TelemetryConfig(endpoint=collector.endpoint, queue_spans=2, span_delay_s=60)
    telemetry = setup_telemetry(config, "small", environ={}, install=False)
    for number in range(500):
        telemetry.tracer("test").start_span(str(number)).end()
    await _flushed(telemetry)
    (point,) = collector.metrics["tailrace.telemetry.spans.dropped"].sum.data_points
    assert point.as_int + len(collector.spans) == 500
    assert point.as_int > 0
    assert _attributes(point) == {"reason": "queue_full"}


# No collector


def _closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _exporting_to(endpoint: str) -> Telemetry:
    config = TelemetryConfig(
        endpoint=endpoint, span_delay_s=0.05, metric_interval_s=0.1, export_timeout_s=0.2
    )
    return setup_telemetry(config, "lonely", environ={}, install=False)


async def test_calls_go_on_without_a_collector_and_the_log_gets_one_line(
    stack: Any, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = f"http://127.0.0.1:{_closed_port()}"
    telemetry = _exporting_to(endpoint)
    server = await stack.serve(telemetry=telemetry)
    stub = await stack.stub(server.address, telemetry=telemetry)
    with caplog.at_level(logging.INFO):
        ends = time.monotonic() + 1.5  # some thirty exports fail in this time
        while time.monotonic() < ends:
            assert await stub.echo(b"hi", timeout=20) == b"hi"
            await asyncio.sleep(0.02)
        await _flushed(telemetry, server)
    lines = [r.getMessage() for r in caplog.records if "serving" not in r.getMessage()]
    assert len(lines) == 1, lines
    assert f"cannot export to {endpoint}" in lines[0]
    assert "UNAVAILABLE" in lines[0] or "DEADLINE_EXCEEDED" in lines[0]


@pytest.mark.parametrize("peer", ["closed", "silent"])
async def test_shutdown_without_a_collector_ends_within_two_seconds(peer: str) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # accepts connections and never says a word
        port = silent.getsockname()[1] if peer == "silent" else _closed_port()
        config = TelemetryConfig(endpoint=f"http://127.0.0.1:{port}", export_timeout_s=30)
        telemetry = setup_telemetry(config, "lonely", environ={}, install=False)
        for _ in range(2000):
            telemetry.tracer("test").start_span("lost").end()
        telemetry.meter("test").create_counter("lost").add(1)
        began = time.monotonic()
        telemetry.shutdown()
        # The waits add up to 2 s; unbounded, the export alone would go on for 30 s.
        assert time.monotonic() - began < 10


def test_a_process_that_exports_to_nobody_ends_by_itself() -> None:
    program = f"""
from service_kit import TelemetryConfig, setup_telemetry, tracer
telemetry = setup_telemetry(TelemetryConfig(endpoint="http://127.0.0.1:{_closed_port()}"), "p")
for _ in range(1000):
    tracer("t").start_span("s").end()
telemetry.shutdown()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.count("cannot export to") == 1
    assert len(done.stderr.splitlines()) == 1


async def test_the_log_tells_when_the_collector_answers_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    collector = Collector()
    port = int(collector.endpoint.rpartition(":")[2])
    telemetry = _exporting_to(f"http://127.0.0.1:{port}")
    with caplog.at_level(logging.INFO):
        telemetry.tracer("test").start_span("lost").end()
        await _eventually(lambda: "cannot export" in caplog.text)
        collector.start()

        def arrived() -> bool:
            telemetry.tracer("test").start_span("found").end()
            return bool(collector.named("found")) and "answers again" in caplog.text

        await _eventually(arrived)
        await _flushed(telemetry)
    collector.stop()


async def _eventually(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 -- threads of the SDK set no event
            await asyncio.sleep(0.02)


def test_without_an_endpoint_there_is_no_sdk_no_thread_and_no_span() -> None:
    program = """
import sys, threading
from service_kit import TelemetryConfig, setup_telemetry, tracer
from service_kit.telemetry import active_telemetry
telemetry = setup_telemetry(TelemetryConfig(), "quiet", environ={})
with tracer("t").start_as_current_span("s") as span:
    assert not span.is_recording()
assert not telemetry.enabled
assert active_telemetry() is None
assert threading.active_count() == 1
assert "opentelemetry.sdk" not in sys.modules
telemetry.shutdown()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_environment_names_the_collector_and_can_switch_telemetry_off() -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{_closed_port()}"}

    def enabled(config: TelemetryConfig, **more: str) -> bool:
        made = setup_telemetry(config, "env", environ={**environ, **more}, install=False)
        made.shutdown()
        return made.enabled

    assert enabled(TelemetryConfig())
    assert not enabled(TelemetryConfig(), OTEL_SDK_DISABLED="true")
    assert not enabled(TelemetryConfig(enabled=False))


async def test_calls_follow_a_provider_that_an_embedding_program_installed(
    stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exported))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    server = await stack.serve()
    await (await stack.stub(server.address)).echo(b"", timeout=20)
    await server.drain()
    assert [span.name for span in exported.get_finished_spans()] == [ECHO, ECHO]
