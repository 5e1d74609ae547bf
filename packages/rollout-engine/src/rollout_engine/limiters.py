"""`core.concurrency.SlotQueue` for coroutines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rollout_engine.core.concurrency import LimiterStatus, SlotQueue


class Limiter:
    """At most `limit` coroutines at once inside `slot`; those of lower priority number first.

    Args:
        name: Shown in status and errors.
        limit: 0: no limit.
        clock: Monotonic seconds.

    """

    def __init__(self, name: str, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._queue: SlotQueue[object] = SlotQueue(name, limit)
        self._clock = clock
        self._waiters: dict[object, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def slot(self, priority: tuple[int, ...] = ()) -> AsyncIterator[float]:
        """Hold a slot for the body; yields the seconds waited for it."""
        ticket = object()
        asked_s = self._clock()
        if not self._queue.request(ticket, priority, asked_s):
            await self._wait(ticket)
        try:
            yield self._clock() - asked_s
        finally:
            self._release(ticket)

    def status(self) -> LimiterStatus:
        """Give the figures as of now."""
        return self._queue.status(self._clock())

    async def _wait(self, ticket: object) -> None:
        waiter = self._waiters[ticket] = asyncio.get_running_loop().create_future()
        try:
            await waiter
        except asyncio.CancelledError:
            if self._queue.holds(ticket):
                # Granted and cancelled in the same turn of the loop.
                self._release(ticket)
            else:
                self._queue.withdraw(ticket)
            raise
        finally:
            del self._waiters[ticket]

    def _release(self, ticket: object) -> None:
        for granted in self._queue.release(ticket, self._clock()):
            waiter = self._waiters[granted]
            if not waiter.done():
                waiter.set_result(None)


__all__ = ["Limiter"]
