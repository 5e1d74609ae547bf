from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from service_kit import (
    ChannelConfig,
    ConfigError,
    Deadline,
    DeadlineExceeded,
    MissingDeadlineError,
    NotFound,
    Reason,
    RetryConfig,
    ServerConfig,
    ServiceError,
    StartupError,
    Unauthenticated,
    Unavailable,
    load_config,
    open_channel,
    remaining_s,
)

NAME = "test.v1.EchoService"
TOKEN = "correct horse battery staple"
FAST = RetryConfig(initial_backoff_s=0.01, max_backoff_s=0.02)


# Deadlines


async def test_a_unary_call_without_a_timeout_is_refused_before_it_is_sent(stack: Any) -> None:
    server = await stack.serve()
    stub = await stack.stub(server.address)
    with pytest.raises(MissingDeadlineError, match=r"test.v1.EchoService/Echo at 127.*timeout="):
        stub.echo(b"")
    assert stack.echo.calls == 0


async def test_the_default_timeout_of_the_channel_counts_for_calls_that_pass_none(
    stack: Any,
) -> None:
    seen: list[float] = []

    async def on_unary(request: bytes, context: Any) -> bytes:
        seen.append(remaining_s(context, default_s=1e9))
        return request

    stack.echo.on_unary = on_unary
    server = await stack.serve()
    stub = await stack.stub(server.address, default_timeout_s=30.0)
    await stub.echo(b"")
    await stub.echo(b"", timeout=100)
    assert seen[0] < 32  # gRPC rounds up on the wire
    assert 32 < seen[1] < 102


async def test_the_handler_learns_the_remaining_time(stack: Any) -> None:
    seen: list[Deadline] = []

    async def on_unary(request: bytes, context: Any) -> bytes:
        seen.append(Deadline.of_call(context, at_most_s=1000, reserve_s=10, clock=lambda: 0.0))
        seen.append(Deadline.of_call(context, at_most_s=20, clock=lambda: 0.0))
        return request

    stack.echo.on_unary = on_unary
    server = await stack.serve()
    await (await stack.stub(server.address)).echo(b"", timeout=100)
    assert 50 < seen[0].at_s < 92  # gRPC rounds up on the wire
    assert seen[1].at_s == 20


async def test_a_passed_deadline_is_retryable_and_cancels_the_handler(stack: Any) -> None:
    server = await stack.serve()
    stub = await stack.stub(server.address)
    with pytest.raises(DeadlineExceeded) as passed:
        await stub.hang(b"", timeout=0.1)
    assert passed.value.retryable
    await asyncio.wait_for(stack.echo.cancelled.wait(), 20)


# Cancellation


async def test_cancelling_the_callers_task_cancels_the_handler(stack: Any) -> None:
    server = await stack.serve()
    stub = await stack.stub(server.address)

    async def call() -> None:
        await stub.hang(b"", timeout=60)

    task = asyncio.create_task(call())
    await stack.echo.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(stack.echo.cancelled.wait(), 20)


async def test_leaving_a_stream_early_cancels_the_handler(stack: Any) -> None:
    server = await stack.serve()
    stub = await stack.stub(server.address)

    async def first() -> Any:
        async for message in stub.count(b"3+"):
            return message
        return None

    gc.disable()  # a dropped stream ends by itself, not when the garbage collector comes round
    try:
        assert await first() == b"0"
        await asyncio.wait_for(stack.echo.cancelled.wait(), 20)
    finally:
        gc.enable()


async def test_a_callback_keeps_no_dropped_stream_alive(stack: Any) -> None:
    server = await stack.serve()
    call = (await stack.stub(server.address)).count(b"3+")
    ended: list[Any] = []
    call.add_done_callback(ended.append)
    assert await call.read() == b"0"
    gc.disable()
    try:
        del call
        await asyncio.wait_for(stack.echo.cancelled.wait(), 20)
    finally:
        gc.enable()
    assert len(ended) == 1


# The four kinds of calls


async def test_all_kinds_of_calls_work_with_iterators_and_with_reads_and_writes(stack: Any) -> None:
    server = await stack.serve()
    stub = await stack.stub(server.address)

    async def requests() -> AsyncIterator[bytes]:
        yield b"a"
        yield b"b"

    assert await stub.join(requests()) == b"ab"
    assert await stub.join([b"c", b"d"]) == b"cd"
    assert [message async for message in stub.chat(requests(), 5)] == [b"A", b"B"]

    joined = stub.join(timeout=5)
    await joined.write(b"x")
    await joined.write(b"y")
    await joined.done_writing()
    assert await joined == b"xy"

    chat = stub.chat(metadata=(("key", "value"),))
    await chat.write(b"p")
    assert await chat.read() == b"P"
    await chat.done_writing()
    assert await chat.read() is grpc.aio.EOF
    assert await chat.code() is grpc.StatusCode.OK
    assert chat.done()
    assert not chat.cancelled()


async def test_a_stream_may_be_left_and_taken_up_again(stack: Any) -> None:
    server = await stack.serve()
    call = (await stack.stub(server.address)).count(b"4")
    seen = []
    async for message in call:
        seen.append(message)
        if len(seen) == 2:
            break
    seen += [message async for message in call]
    assert seen == [b"0", b"1", b"2", b"3"]


async def test_a_failing_request_iterator_raises_its_own_error_and_not_a_cancellation(
    stack: Any,
) -> None:
    server = await stack.serve()
    stub = await stack.stub(server.address)

    async def requests() -> AsyncIterator[bytes]:
        yield b"a"
        raise LookupError("the source broke")

    with pytest.raises(LookupError, match="the source broke"):
        await stub.join(requests(), timeout=20)
    with pytest.raises(LookupError, match="the source broke"):
        async for _ in stub.chat(requests(), timeout=20):
            pass


@pytest.mark.parametrize("end", ["server", "cancel", "drop"])
async def test_a_request_iterator_is_closed_when_the_call_ends_before_it(
    stack: Any, end: str
) -> None:
    closed = asyncio.Event()

    async def requests() -> AsyncIterator[bytes]:
        try:
            yield b"bye" if end == "server" else b"hello"
            await asyncio.Event().wait()
        finally:
            closed.set()

    server = await stack.serve()
    stub = await stack.stub(server.address)
    call = stub.chat(requests(), timeout=60)
    assert await call.read() in {b"BYE", b"HELLO"}
    if end == "server":
        assert await call.read() is grpc.aio.EOF
    elif end == "cancel":
        call.cancel()
    else:
        del call
    await asyncio.wait_for(closed.wait(), 20)


# Errors


async def test_an_unreachable_peer_is_unavailable_and_names_method_and_target(
    stack: Any, tmp_path: Path
) -> None:
    stub = await stack.stub(f"unix:{tmp_path}/nobody.sock")
    with pytest.raises(Unavailable, match=r"EchoService/Echo at unix:.*nobody\.sock: ") as failed:
        await stub.echo(b"", timeout=5)
    assert failed.value.retryable
    assert failed.value.reason is Reason.UNAVAILABLE


async def test_an_unknown_method_is_unimplemented(stack: Any) -> None:
    server = await stack.serve()
    channel = await stack.channel(server.address)
    with pytest.raises(ServiceError) as failed:
        await channel.unary_unary("/test.v1.EchoService/Nothing")(b"", timeout=5)
    assert failed.value.reason is Reason.UNIMPLEMENTED


async def test_calls_can_wait_for_a_peer_that_comes_up_later(stack: Any, tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/late.sock"
    stub = await stack.stub(target, wait_for_ready=True)
    call = asyncio.ensure_future(_awaited(stub.echo(b"early", timeout=30)))
    await stack.serve(ServerConfig(bind=target))
    assert await call == b"early"


async def _awaited(call: Any) -> Any:
    return await call


# Retries


def _flaky(failures: int, **details: Any) -> Any:
    left = failures

    async def on_unary(request: bytes, context: Any) -> bytes:
        nonlocal left
        left -= 1
        if left >= 0:
            raise Unavailable("not now", **details)
        return b"served"

    return on_unary


async def test_idempotent_methods_are_retried_when_unavailable(stack: Any) -> None:
    stack.echo.on_unary = _flaky(3)
    server = await stack.serve()
    stub = await stack.stub(server.address, idempotent=[f"{NAME}/Echo"], retry=FAST)
    assert await stub.echo(b"", timeout=20) == b"served"
    assert stack.echo.calls == 4


async def test_other_methods_are_never_retried(stack: Any) -> None:
    stack.echo.on_unary = _flaky(1)
    server = await stack.serve()
    stub = await stack.stub(server.address, idempotent=[f"{NAME}/Other"], retry=FAST)
    with pytest.raises(Unavailable, match="not now"):
        await stub.echo(b"", timeout=20)
    assert stack.echo.calls == 1


def _contract(level: descriptor_pb2.MethodOptions.IdempotencyLevel.ValueType) -> FileDescriptor:
    file = descriptor_pb2.FileDescriptorProto(
        name=f"test/v1/echo_{level}.proto", package="test.v1", syntax="proto3"
    )
    file.message_type.add(name="Nothing")
    method = file.service.add(name="EchoService").method.add(
        name="Echo", input_type=".test.v1.Nothing", output_type=".test.v1.Nothing"
    )
    method.options.idempotency_level = level
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool.FindFileByName(file.name)


@pytest.mark.parametrize(
    ("level", "calls"),
    [
        (descriptor_pb2.MethodOptions.NO_SIDE_EFFECTS, 2),
        (descriptor_pb2.MethodOptions.IDEMPOTENT, 2),
        (descriptor_pb2.MethodOptions.IDEMPOTENCY_UNKNOWN, 1),
    ],
)
async def test_the_contract_says_which_methods_are_idempotent(
    stack: Any, level: Any, calls: int
) -> None:
    stack.echo.on_unary = _flaky(1)
    server = await stack.serve()
    stub = await stack.stub(server.address, contracts=[_contract(level)], retry=FAST)
    if calls == 2:
        assert await stub.echo(b"", timeout=20) == b"served"
    else:
        with pytest.raises(Unavailable):
            await stub.echo(b"", timeout=20)
    assert stack.echo.calls == calls


async def test_an_error_marked_as_hopeless_is_not_retried_even_for_idempotent_methods(
    stack: Any,
) -> None:
    stack.echo.on_unary = _flaky(1, retryable=False)
    server = await stack.serve()
    stub = await stack.stub(server.address, idempotent=[f"{NAME}/Echo"], retry=FAST)
    with pytest.raises(Unavailable) as failed:
        await stub.echo(b"", timeout=20)
    assert not failed.value.retryable
    assert stack.echo.calls == 1


async def test_a_wait_that_the_service_asks_for_is_kept_if_the_deadline_allows(stack: Any) -> None:
    stack.echo.on_unary = _flaky(1, retry_after_s=0.3)
    server = await stack.serve()
    stub = await stack.stub(server.address, idempotent=[f"{NAME}/Echo"], retry=FAST)
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await stub.echo(b"", timeout=20) == b"served"
    assert loop.time() - began >= 0.3


async def test_a_wait_beyond_the_deadline_surfaces_the_reason_at_once(stack: Any) -> None:
    stack.echo.on_unary = _flaky(9, retry_after_s=60)
    server = await stack.serve()
    stub = await stack.stub(server.address, idempotent=[f"{NAME}/Echo"], retry=FAST)
    with pytest.raises(Unavailable) as failed:
        await stub.echo(b"", timeout=20)
    assert failed.value.retry_after_s == 60
    assert stack.echo.calls == 1


async def test_other_failures_of_idempotent_methods_are_not_retried(stack: Any) -> None:
    async def on_unary(request: bytes, context: Any) -> bytes:
        raise NotFound("nothing here")

    stack.echo.on_unary = on_unary
    server = await stack.serve()
    stub = await stack.stub(server.address, idempotent=[f"{NAME}/Echo"], retry=FAST)
    with pytest.raises(NotFound):
        await stub.echo(b"", timeout=20)
    assert stack.echo.calls == 1


# Token and TLS


async def test_a_token_is_asked_for_and_accepted(stack: Any) -> None:
    server = await stack.serve(ServerConfig.model_validate({"token": TOKEN}))
    assert await (await stack.stub(server.address, token=TOKEN)).echo(b"hi", timeout=5) == b"hi"

    for settings in ({}, {"token": "a wrong token of some length"}):
        stub = await stack.stub(server.address, **settings)
        with pytest.raises(Unauthenticated) as refused:
            await stub.echo(b"", timeout=5)
        assert refused.value.reason is Reason.UNAUTHENTICATED
        assert TOKEN not in str(refused.value)
        with pytest.raises(Unauthenticated):
            async for _ in stub.count(b"1"):
                pass
        with pytest.raises(Unauthenticated):
            await stub.join([b"a"], timeout=5)
        with pytest.raises(Unauthenticated):
            async for _ in stub.chat([b"a"], timeout=5):
                pass
    assert stack.echo.calls == 1


async def test_health_checks_need_no_token(stack: Any) -> None:
    from service_kit import wait_until_serving

    server = await stack.serve(ServerConfig.model_validate({"token": TOKEN}))
    await wait_until_serving(await stack.channel(server.address), service=NAME, timeout_s=20)


async def test_tls_and_a_token_file_allow_a_public_address(
    stack: Any, certificates: Any, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    server = await stack.serve(
        ServerConfig(
            bind="0.0.0.0:0",
            tls_certificate=certificates.server,
            tls_key=certificates.server_key,
            token_file=tmp_path / "token",
        )
    )
    target = server.address.replace("0.0.0.0", "localhost")
    stub = await stack.stub(target, tls_ca=certificates.ca, token_file=tmp_path / "token")
    assert await stub.echo(b"secret", timeout=20) == b"secret"

    plain = await stack.stub(target, token_file=tmp_path / "token")
    with pytest.raises(Unavailable):
        await plain.echo(b"", timeout=20)
    untrusting = await stack.stub(target, tls=True, token_file=tmp_path / "token")
    with pytest.raises(Unavailable):
        await untrusting.echo(b"", timeout=20)


async def test_mutual_tls_refuses_a_client_without_a_certificate(
    stack: Any, certificates: Any
) -> None:
    server = await stack.serve(
        ServerConfig(
            tls_certificate=certificates.server,
            tls_key=certificates.server_key,
            tls_client_ca=certificates.ca,
        )
    )
    known = await stack.stub(
        server.address,
        tls_ca=certificates.ca,
        tls_certificate=certificates.client,
        tls_key=certificates.client_key,
    )
    assert await known.echo(b"known", timeout=20) == b"known"
    stranger = await stack.stub(server.address, tls_ca=certificates.ca)
    with pytest.raises(Unavailable):
        await stranger.echo(b"", timeout=20)


async def test_a_server_name_can_differ_from_the_targets_host(
    stack: Any, certificates: Any, tmp_path: Path
) -> None:
    server = await stack.serve(
        ServerConfig(
            bind=f"unix:{tmp_path}/tls.sock",
            tls_certificate=certificates.server,
            tls_key=certificates.server_key,
        )
    )
    stub = await stack.stub(server.address, tls_ca=certificates.ca, tls_server_name="localhost")
    assert await stub.echo(b"named", timeout=20) == b"named"


def test_a_token_never_crosses_the_network_in_the_clear() -> None:
    with pytest.raises(ConfigError, match="in the clear"):
        load_config(
            ChannelConfig,
            env_prefix="X",
            overrides=["target=sandboxes.example.org:7101", f"token={TOKEN}"],
        )


async def test_missing_or_short_secrets_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"token_file: cannot read .*nothing: No such file"):
        open_channel(ChannelConfig(target="127.0.0.1:1", token_file=tmp_path / "nothing"))
    (tmp_path / "short").write_text("hunter2")
    with pytest.raises(StartupError, match=r"short: expected a token of at least 16") as short:
        open_channel(ChannelConfig(target="127.0.0.1:1", token_file=tmp_path / "short"))
    assert "hunter2" not in str(short.value)
    with pytest.raises(StartupError, match="tls_ca: cannot read"):
        open_channel(ChannelConfig(target="127.0.0.1:1", tls_ca=tmp_path / "ca.pem"))


async def test_secrets_do_not_show_when_a_config_is_printed() -> None:
    config = ServerConfig.model_validate({"token": TOKEN})
    assert TOKEN not in repr(config)
    assert TOKEN not in str(config)
