from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from service_kit import DeadlineExceeded, with_heartbeat, with_idle_deadline


class Source:
    """Yields what is put into its queue; None ends it, an exception is raised."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[str | Exception | None] = asyncio.Queue()
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True


class Call:
    """A stream that can be cancelled, as a gRPC call."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> bool:
        self.cancelled = True
        return True

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> str:
        await asyncio.Event().wait()
        raise StopAsyncIteration


async def test_messages_pass_and_the_end_ends() -> None:
    source = Source()
    for item in ("a", "b", None):
        source.queue.put_nowait(item)
    assert [item async for item in with_idle_deadline(source, 60, "it")] == ["a", "b"]


async def test_silence_is_a_retryable_error_that_names_the_stream_and_frees_it() -> None:
    source = Source()
    source.queue.put_nowait("a")
    stream = with_idle_deadline(source, 0.01, "RunGroups of engine 1")
    assert await anext(stream) == "a"
    with pytest.raises(
        DeadlineExceeded, match=r"RunGroups of engine 1 was silent for 0\.01 s"
    ) as e:
        await anext(stream)
    assert e.value.retryable
    assert source.closed


async def test_a_silent_call_is_cancelled() -> None:
    call = Call()
    with pytest.raises(DeadlineExceeded):
        await anext(with_idle_deadline(call, 0.01, "it"))
    assert call.cancelled


async def test_a_streams_own_timeout_is_not_taken_for_silence() -> None:
    source = Source()
    source.queue.put_nowait(TimeoutError("of the source"))
    with pytest.raises(TimeoutError, match="of the source"):
        await anext(with_idle_deadline(source, 60, "it"))


async def test_leaving_early_frees_the_stream() -> None:
    source = Source()
    source.queue.put_nowait("a")
    stream = with_idle_deadline(source, 60, "it")
    assert await anext(stream) == "a"
    await stream.aclose()  # type: ignore[attr-defined]
    assert source.closed


async def test_cancelling_the_reader_is_no_idle_error() -> None:
    task = asyncio.ensure_future(anext(with_idle_deadline(Source(), 60, "it")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_items_pass_in_order_without_heartbeats_while_they_come() -> None:
    source = Source()
    for item in ("a", "b", "c", None):
        source.queue.put_nowait(item)
    assert [i async for i in with_heartbeat(source, 60, lambda: "beat")] == ["a", "b", "c"]


async def test_silence_is_filled_with_heartbeats_and_no_item_is_lost() -> None:
    source = Source()
    beats = 0

    def make() -> str:
        nonlocal beats
        beats += 1
        if beats == 3:
            source.queue.put_nowait("a")
            source.queue.put_nowait(None)
        return f"beat {beats}"

    stream = with_heartbeat(source, 0.001, make)
    seen = [item async for item in stream]
    assert seen[:3] == ["beat 1", "beat 2", "beat 3"]
    assert [item for item in seen if not item.startswith("beat")] == ["a"]


async def test_the_sources_error_comes_through() -> None:
    source = Source()
    source.queue.put_nowait(LookupError("broken"))
    with pytest.raises(LookupError, match="broken"):
        await anext(with_heartbeat(source, 60, lambda: "beat"))
    assert source.closed


async def test_closing_while_an_item_is_awaited_frees_the_source_and_leaves_no_task() -> None:
    source = Source()
    stream = with_heartbeat(source, 0.001, lambda: "beat")
    assert await anext(stream) == "beat"
    before = asyncio.all_tasks()
    assert len(before) == 2
    await stream.aclose()  # type: ignore[attr-defined]
    assert source.closed
    assert len(asyncio.all_tasks()) == 1
