from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from service_kit import (
    BusyPort,
    ConfigError,
    Reason,
    Server,
    ServerConfig,
    Service,
    ServiceError,
    StartupError,
    Unavailable,
    load_config,
    wait_until_serving,
)
from service_kit.health import HealthServicer

NAME = "test.v1.EchoService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_serves_on_loopback_by_default_and_reports_its_real_port(stack: Any) -> None:
    server = await stack.serve(ServerConfig())
    host, port = server.address.split(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    assert await (await stack.stub(server.address)).echo(b"hello", timeout=5) == b"hello"


async def test_serves_on_a_unix_socket(stack: Any, tmp_path: Path) -> None:
    server = await stack.serve(ServerConfig(bind=f"unix:{tmp_path}/echo.sock"))
    assert await (await stack.stub(server.address)).echo(b"hello", timeout=5) == b"hello"


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", "192.0.2.7:7101", "example.org:7101"])
def test_a_public_address_without_tls_and_token_is_refused(bind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs tls_certificate, tls_key and token_file"):
        load_config(ServerConfig, env_prefix="X", overrides=[f"bind={bind}"])
    with pytest.raises(ConfigError, match="needs"):
        load_config(ServerConfig, env_prefix="X", overrides=[f"bind={bind}", "token=" + "t" * 32])
    with pytest.raises(ConfigError, match="needs"):
        load_config(
            ServerConfig,
            env_prefix="X",
            overrides=[f"bind={bind}", "tls_certificate=a.pem", "tls_key=a.key"],
        )


async def test_a_busy_port_is_a_clear_error_and_not_shared(stack: Any) -> None:
    first = await stack.serve()
    with pytest.raises(
        BusyPort, match=rf"cannot listen on {first.address}: Address already in use"
    ):
        await Server(ServerConfig(bind=first.address), []).start()


async def test_an_address_of_another_machine_is_a_clear_error(tmp_path: Path) -> None:
    config = ServerConfig(
        bind="192.0.2.1:7999",
        tls_certificate=tmp_path / "a",
        tls_key=tmp_path / "b",
        token_file=tmp_path / "c",
    )
    (tmp_path / "c").write_text("t" * 32)
    with pytest.raises(BusyPort, match=r"192\.0\.2\.1:7999: Cannot assign"):
        await Server(config, []).start()


async def test_the_address_file_holds_the_bound_address(stack: Any, tmp_path: Path) -> None:
    file = tmp_path / "run" / "address"
    server = await stack.serve(ServerConfig(address_file=file))
    assert file.read_text() == server.address + "\n"


async def test_an_address_file_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    server = Server(ServerConfig(address_file=tmp_path / "file" / "address"), [])
    with pytest.raises(StartupError, match="address_file: cannot write"):
        await server.start()


async def test_health_tells_each_service_and_the_whole_server(stack: Any) -> None:
    server = await stack.serve()
    health = health_pb2_grpc.HealthStub(await stack.channel(server.address))

    async def status(service: str) -> Any:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await health.Check(request, timeout=5)).status

    assert await status("") == SERVING
    assert await status(NAME) == SERVING
    server.set_serving(NAME, False)
    assert await status(NAME) == NOT_SERVING
    assert await status("") == SERVING
    with pytest.raises(ServiceError, match=r"known: \['', 'test.v1.EchoService'\]"):
        await status("other.v1.Service")


async def test_a_health_watcher_sees_changes_and_its_stream_ends_with_the_drain(stack: Any) -> None:
    server = await stack.serve(ServerConfig(drain_grace_s=60))
    health = health_pb2_grpc.HealthStub(await stack.channel(server.address))
    watch = health.Watch(health_pb2.HealthCheckRequest(service=NAME), timeout=30)
    seen = [(await watch.read()).status]
    server.set_serving(NAME, False)
    seen.append((await watch.read()).status)
    server.set_serving(NAME, True)
    seen.append((await watch.read()).status)
    # Were the stream to stay open, the drain would last its whole grace of 60 s.
    await asyncio.wait_for(server.drain(), 20)
    seen.append((await watch.read()).status)
    assert await watch.read() is grpc.aio.EOF
    assert seen == [SERVING, NOT_SERVING, SERVING, NOT_SERVING]


async def test_a_health_watcher_hears_of_a_drain_that_begins_while_it_is_told_something_else() -> (
    None
):
    health = HealthServicer()
    health.set_serving(NAME, serving=True)
    request = health_pb2.HealthCheckRequest(service=NAME)
    unused: Any = None
    watch = health.Watch(request, unused)
    seen = [(await anext(watch)).status]
    health.drain()
    seen += [reply.status async for reply in watch]
    assert seen == [SERVING, NOT_SERVING]


async def test_waiting_for_a_peer_ends_when_it_serves(stack: Any, tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/late.sock"
    channel = await stack.channel(target)
    waiting = asyncio.ensure_future(wait_until_serving(channel, service=NAME, timeout_s=20))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.05)
    server = await stack.serve(ServerConfig(bind=target))
    await asyncio.wait_for(waiting, 20)
    assert server.address == target


async def test_waiting_for_a_peer_that_does_not_serve_tells_its_last_state(stack: Any) -> None:
    server = await stack.serve()
    server.set_serving(NAME, False)
    channel = await stack.channel(server.address)
    with pytest.raises(Unavailable, match=r"did not serve within 0\.2 s; last seen: NOT_SERVING"):
        await wait_until_serving(channel, service=NAME, timeout_s=0.2)


async def test_a_drain_finishes_streams_in_flight_and_refuses_new_calls(stack: Any) -> None:
    server = await stack.serve(ServerConfig(drain_grace_s=60))
    stub = await stack.stub(server.address)
    stream = stub.count(b"3+")
    assert [await stream.read() for _ in range(3)] == [b"0", b"1", b"2"]

    draining = asyncio.ensure_future(server.drain())
    await server.draining.wait()
    with pytest.raises(Unavailable) as refused:
        await stub.echo(b"new", timeout=20)
    assert refused.value.reason is Reason.DRAINING
    assert refused.value.retryable
    with pytest.raises(Unavailable):
        await stub.count(b"1").read()
    assert not draining.done()

    stack.echo.release.set()
    assert await stream.read() == b"released"
    assert await stream.read() is grpc.aio.EOF
    await asyncio.wait_for(draining, 20)
    with pytest.raises(Unavailable):
        await stub.echo(b"late", timeout=20)


async def test_calls_that_outlive_the_grace_are_cancelled_and_told_so(stack: Any) -> None:
    server = await stack.serve(ServerConfig(drain_grace_s=0.1))
    stub = await stack.stub(server.address)
    call, stream = stub.hang(b"", timeout=60), stub.count(b"1+")
    assert await stream.read() == b"0"
    await stack.echo.started.wait()
    await asyncio.wait_for(server.drain(), 20)
    for waiting in (call, stream.read()):
        with pytest.raises(Unavailable) as cut:
            await waiting
        assert cut.value.reason is Reason.DRAINING
    assert stack.echo.cancelled.is_set()


async def test_a_cancelled_drain_stops_at_once(stack: Any) -> None:
    server = await stack.serve(ServerConfig(drain_grace_s=600))
    call = (await stack.stub(server.address)).hang(b"", timeout=600)
    await stack.echo.started.wait()
    draining = asyncio.ensure_future(server.drain())
    await server.draining.wait()
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining
    with pytest.raises(Unavailable):
        await call


async def test_on_drain_lets_a_service_end_its_streams(stack: Any) -> None:
    async def on_drain() -> None:
        stack.echo.release.set()

    server = await stack.serve(ServerConfig(drain_grace_s=60), on_drain=on_drain)
    stream = (await stack.stub(server.address)).count(b"1+")
    assert await stream.read() == b"0"
    await asyncio.wait_for(server.drain(), 20)
    assert await stream.read() == b"released"


async def test_a_failing_on_drain_does_not_stop_the_drain(
    stack: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def on_drain() -> None:
        raise KeyError("lost")

    server = await stack.serve(on_drain=on_drain)
    with caplog.at_level(logging.ERROR):
        await asyncio.wait_for(server.drain(), 20)
    assert "on_drain of test.v1.EchoService failed" in caplog.text


async def test_draining_twice_at_once_is_one_drain(stack: Any) -> None:
    server = await stack.serve()
    await asyncio.gather(server.drain(), server.drain())
    await server.drain()


async def test_a_unary_call_without_a_deadline_is_refused_by_the_server(stack: Any) -> None:
    server = await stack.serve()
    async with grpc.aio.insecure_channel(server.address) as plain:
        echo: Any = plain.unary_unary(f"/{NAME}/Echo")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await echo(b"")
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "pass a timeout" in (refused.value.details() or "")
        assert stack.echo.calls == 0
        assert await echo(b"timed", timeout=5) == b"timed"


async def test_streams_and_a_lenient_server_need_no_deadline(stack: Any) -> None:
    server = await stack.serve(ServerConfig(require_deadline=False))
    async with grpc.aio.insecure_channel(server.address) as plain:
        echo: Any = plain.unary_unary(f"/{NAME}/Echo")
        assert await echo(b"untimed") == b"untimed"
        count: Any = plain.unary_stream(f"/{NAME}/Count")
        assert [message async for message in count(b"2")] == [b"0", b"1"]


async def test_a_message_above_the_limit_is_too_large_and_not_retryable(stack: Any) -> None:
    server = await stack.serve(ServerConfig(max_message_bytes=2048))
    stub = await stack.stub(server.address)
    with pytest.raises(ServiceError) as refused:
        await stub.echo(b"x" * 4096, timeout=5)
    assert refused.value.reason is Reason.TOO_LARGE
    assert not refused.value.retryable


async def test_calls_above_the_concurrency_limit_are_refused_as_retryable(stack: Any) -> None:
    server = await stack.serve(ServerConfig(max_concurrent_calls=1))
    stub = await stack.stub(server.address)
    held = stub.hang(b"held", timeout=30)
    await stack.echo.started.wait()
    with pytest.raises(ServiceError) as refused:
        await stub.echo(b"", timeout=5)
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused.value.reason is Reason.QUOTA_EXHAUSTED
    assert refused.value.retryable
    stack.echo.release.set()
    assert await held == b"held"


async def test_a_synchronous_handler_is_refused_at_its_first_call(stack: Any) -> None:
    def register(server: grpc.aio.Server) -> None:
        handler: Any = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.v1.Sync", {"Echo": handler}),)
        )

    async with Server(ServerConfig(), [Service("test.v1.Sync", register)]) as server:
        channel = await stack.channel(server.address)
        with pytest.raises(ServiceError):
            await channel.unary_unary("/test.v1.Sync/Echo")(b"", timeout=5)


async def test_settings_that_contradict_each_other_are_refused() -> None:
    for overrides, message in {
        ("tls_certificate=a.pem",): "belong together",
        ("tls_client_ca=a.pem",): "tls_client_ca needs",
        ("token=" + "t" * 20, "token_file=x"): "not both",
        ("bind=localhost",): "expected host:port",
        ("bind=::1:80",): "in brackets",
        ("bind=127.0.0.1:99999",): "expected host:port",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_config(ServerConfig, env_prefix="X", overrides=overrides)
