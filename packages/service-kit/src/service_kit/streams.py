"""Long streams: a heartbeat from whoever sends, an idle deadline with whoever receives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any, TypeVar

from service_kit.errors import DeadlineExceeded

T = TypeVar("T")


async def with_idle_deadline(
    stream: AsyncIterable[T], idle_s: float, what: str
) -> AsyncIterator[T]:
    """Yield a stream's messages; fail when it is silent for too long.

    Args:
        stream: Usually a streaming call. It is cancelled when this iterator ends early.
        idle_s: Longest silence allowed, several times the sender's heartbeat interval.
        what: Names the stream in the error, such as `RunGroups of 127.0.0.1:7104`.

    Raises:
        DeadlineExceeded: After a silence; retryable, for the caller resumes at its cursor.
    """
    messages = aiter(stream)
    ended = False
    try:
        while True:
            limit = asyncio.timeout(idle_s)
            try:
                async with limit:
                    message = await anext(messages)
            except StopAsyncIteration:
                ended = True
                return
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise DeadlineExceeded(
                    f"{what} was silent for {idle_s:g} s, heartbeats included; "
                    "connect again and resume at the cursor",
                    retryable=True,
                ) from error
            yield message
    finally:
        if not ended:
            await _close(stream, messages)


async def with_heartbeat(
    items: AsyncIterable[T], interval_s: float, make: Callable[[], T]
) -> AsyncIterator[T]:
    """Yield the items, and `make()` whenever none came for `interval_s`.

    The items' iterator is never cancelled by a heartbeat, only when this iterator is closed.

    Args:
        items: What there is to send.
        interval_s: Longest silence on the stream.
        make: Makes a heartbeat; called when it is due, so that it can carry the state of then.
    """
    source = aiter(items)
    pending: asyncio.Task[T] | None = None
    ended = False
    try:
        while True:
            if pending is None:
                pending = asyncio.ensure_future(_next(source))
            done, _ = await asyncio.wait({pending}, timeout=interval_s)
            if not done:
                yield make()
                continue
            finished, pending = pending, None
            try:
                item = finished.result()
            except _Exhausted:
                ended = True
                return
            yield item
    finally:
        if pending is not None:
            pending.cancel()
            with contextlib.suppress(asyncio.CancelledError, _Exhausted):
                await pending
        if not ended:
            await _close(items, source)


class _Exhausted(Exception):  # noqa: N818 -- a signal, as StopAsyncIteration, which tasks cannot raise
    pass


async def _next(source: AsyncIterator[T]) -> T:
    try:
        return await anext(source)
    except StopAsyncIteration:
        raise _Exhausted from None


async def _close(stream: Any, messages: Any) -> None:
    """Free what a stream holds that is left before its end: a call, or a generator."""
    if (cancel := getattr(stream, "cancel", None)) is not None:
        cancel()
    elif (close := getattr(messages, "aclose", None)) is not None:
        await close()
