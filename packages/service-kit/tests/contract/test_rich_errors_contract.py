from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from service_kit import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    NotFound,
    OutOfRange,
    Reason,
    ResourceExhausted,
    ServiceError,
    service_error,
)
from service_kit.errors import REASON_TRAITS


async def _failure(stack: Any, raised: BaseException) -> ServiceError:
    async def on_unary(request: bytes, context: Any) -> bytes:
        raise raised

    stack.echo.on_unary = on_unary
    server = await stack.serve()
    stub = await stack.stub(server.address)
    with pytest.raises(ServiceError) as failed:
        await stub.echo(b"", timeout=20)
    error: ServiceError = failed.value
    return error


def _same(left: ServiceError, right: ServiceError) -> bool:
    return (
        type(left) is type(right)
        and left.code is right.code
        and left.message == right.message
        and left.reason is right.reason
        and left.retryable == right.retryable
        and left.retry_after_s == right.retry_after_s
        and left.metadata == right.metadata
        and left.domain == right.domain
    )


@pytest.mark.parametrize(
    "reason", [reason for reason in Reason if reason is not Reason.UNSPECIFIED]
)
async def test_every_reason_arrives_as_it_was_raised(stack: Any, reason: Reason) -> None:
    sent = service_error(reason, f"about {reason}", metadata={"have": "41", "need": "42"})
    received = await _failure(stack, sent)
    assert _same(received, sent)
    assert received.code is REASON_TRAITS[reason].code


async def test_class_text_wait_and_metadata_arrive(stack: Any) -> None:
    sent = ResourceExhausted(
        "all 8 sandboxes are leased; wait, or raise pool.size — größer", retry_after_s=2.5
    )
    received = await _failure(stack, sent)
    assert _same(received, sent)
    assert received.retry_after_s == 2.5
    assert any("EchoService/Echo at 127.0.0.1" in note for note in received.__notes__)


async def test_an_error_in_the_midst_of_a_stream_arrives_after_its_messages(stack: Any) -> None:
    async def chat(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield b"one"
        raise OutOfRange("the cursor is too old", metadata={"oldest": "7"})

    stack.echo.chat = chat
    server = await stack.serve()
    call = (await stack.stub(server.address)).chat([b"x"], timeout=20)
    assert await call.read() == b"one"
    with pytest.raises(OutOfRange) as failed:
        await call.read()
    assert failed.value.reason is Reason.CURSOR_EXPIRED
    assert failed.value.metadata == {"oldest": "7"}


async def test_an_error_that_would_not_fit_into_the_trailers_is_shortened_not_lost(
    stack: Any,
) -> None:
    sent = FailedPrecondition(
        "ü" * 20_000, reason=Reason.PATCH_REJECTED, metadata={"stderr": "x" * 50_000, "b": "c"}
    )
    received = await _failure(stack, sent)
    assert isinstance(received, FailedPrecondition)
    assert received.reason is Reason.PATCH_REJECTED
    assert received.message.startswith("üüü")
    assert received.message.endswith("...")
    assert received.metadata["stderr"].startswith("xxx")


async def test_an_unexpected_exception_is_internal_and_logged_once(
    stack: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        received = await _failure(stack, KeyError("engine"))
    assert isinstance(received, Internal)
    assert not received.retryable
    assert "EchoService/Echo failed with KeyError: 'engine'" in received.message
    logged = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(logged) == 1
    assert logged[0].exc_info is not None


async def test_an_expected_error_is_not_logged(
    stack: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        await _failure(stack, NotFound("no such sandbox"))
    assert caplog.records == []


async def test_the_error_of_a_task_group_arrives_as_itself(stack: Any) -> None:
    sent = NotFound("no such task", metadata={"task": "a"})
    assert _same(await _failure(stack, ExceptionGroup("group", [ExceptionGroup("", [sent])])), sent)


async def test_a_group_that_holds_a_bug_is_internal(stack: Any) -> None:
    mixed = ExceptionGroup("group", [NotFound("no such task"), KeyError("bug")])
    assert isinstance(await _failure(stack, mixed), Internal)


async def test_a_full_disk_has_a_reason_of_its_own(stack: Any) -> None:
    received = await _failure(stack, OSError(errno.ENOSPC, "No space left on device", "/data/x"))
    assert received.reason is Reason.DISK_FULL
    assert "/data/x" in received.message
    assert not received.retryable


async def test_an_inner_timeout_is_a_passed_deadline(stack: Any) -> None:
    assert isinstance(await _failure(stack, TimeoutError("grading")), DeadlineExceeded)


async def test_an_error_of_a_peers_peer_keeps_its_reason(stack: Any) -> None:
    inner = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, details="connection refused")
    received = await _failure(stack, inner)
    assert received.reason is Reason.UNAVAILABLE
    assert "a call made by /test.v1.EchoService/Echo: connection refused" in received.message


async def test_a_plain_abort_of_a_handler_passes_through(stack: Any) -> None:
    async def on_unary(request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.ABORTED, "given up")
        return b""

    stack.echo.on_unary = on_unary
    server = await stack.serve()
    with pytest.raises(ServiceError, match="given up") as failed:
        await (await stack.stub(server.address)).echo(b"", timeout=20)
    assert failed.value.code is grpc.StatusCode.ABORTED
    assert failed.value.domain == ""


async def test_a_cancelled_stream_runs_the_generators_cleanup_at_once(stack: Any) -> None:
    server = await stack.serve()
    call = (await stack.stub(server.address)).count(b"1+", timeout=60)
    assert await call.read() == b"0"
    await stack.echo.started.wait()
    call.cancel()
    await asyncio.wait_for(stack.echo.cancelled.wait(), 20)


async def test_work_that_is_cancelled_inside_the_service_is_told_as_such(stack: Any) -> None:
    async def on_unary(request: bytes, context: Any) -> bytes:
        inner = asyncio.get_running_loop().create_future()
        inner.cancel()
        await inner
        return b""

    stack.echo.on_unary = on_unary
    server = await stack.serve()
    with pytest.raises(Cancelled, match="cancelled inside the service") as failed:
        await (await stack.stub(server.address)).echo(b"", timeout=20)
    assert failed.value.reason is Reason.CANCELLED


async def _endless() -> AsyncIterator[bytes]:
    while True:
        yield b"x" * 100_000


@pytest.mark.parametrize("style", ["iterator", "writes"])
async def test_the_servers_error_arrives_although_the_client_still_writes(
    stack: Any, style: str
) -> None:
    async def chat(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield await anext(requests)
        raise OutOfRange("the cursor is too old")

    stack.echo.chat = chat
    server = await stack.serve()
    stub = await stack.stub(server.address)
    for _ in range(20):  # which comes first, the failed write or the status, is chance
        if style == "iterator":
            call = stub.chat(_endless(), timeout=60)
            with pytest.raises(OutOfRange, match="the cursor is too old"):
                await _drained(call)
        else:
            call = stub.chat(timeout=60)
            with pytest.raises((OutOfRange, asyncio.InvalidStateError)):
                await _write_on(call)
            with pytest.raises(OutOfRange, match="the cursor is too old"):
                await _drained(call)


async def _drained(call: Any) -> list[bytes]:
    return [message async for message in call]


async def _write_on(call: Any) -> None:
    while True:
        await call.write(b"x" * 100_000)


async def test_a_stream_that_the_server_ends_well_while_the_client_writes_ends_well(
    stack: Any,
) -> None:
    async def chat(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        await anext(requests)
        yield b"enough"

    stack.echo.chat = chat
    server = await stack.serve()
    stub = await stack.stub(server.address)
    for _ in range(20):
        assert await _drained(stub.chat(_endless(), timeout=60)) == [b"enough"]


async def test_an_upload_that_is_refused_half_way_tells_why(stack: Any) -> None:
    async def join(requests: AsyncIterator[bytes], context: Any) -> bytes:
        await anext(requests)
        raise ResourceExhausted("the store is full")

    stack.echo.join = join
    server = await stack.serve()
    stub = await stack.stub(server.address)
    for _ in range(20):
        with pytest.raises(ResourceExhausted, match="the store is full"):
            await stub.join(_endless(), timeout=60)


async def test_a_message_is_not_lost_when_the_status_arrives_before_it_is_read(stack: Any) -> None:
    for _ in range(10):
        server = await stack.serve()
        call = (await stack.stub(server.address)).count(b"2", timeout=60)
        assert await call.read() == b"0"
        await server.drain()
        assert await call.read() == b"1"
        assert await call.read() is grpc.aio.EOF
