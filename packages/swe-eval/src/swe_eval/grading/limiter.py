"""A limit on concurrent work whose queue can be seen."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from service_kit.errors import ResourceExhausted


class Limiter:
    """Lets `limit` holders in at once, in the order they came; others wait.

    Args:
        limit: Holders at once.
        max_waiting: Length of the line beyond which newcomers are turned away.
        clock: Seconds of a monotonic clock.
    """

    def __init__(self, limit: int, *, max_waiting: int, clock: Callable[[], float]) -> None:
        self.limit = limit
        self._max_waiting = max_waiting
        self._clock = clock
        self._slots = asyncio.Semaphore(limit)
        self._waits: deque[float] = deque(maxlen=256)
        self.in_use = 0
        self.waiting = 0

    @property
    def waits_s(self) -> list[float]:
        """Waiting times of the latest holders, shortest first."""
        return sorted(self._waits)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[float]:
        """Holds a slot; yields the seconds waited for it.

        Raises:
            ResourceExhausted: the line is full; retryable.
        """
        if self._slots.locked() and self.waiting >= self._max_waiting:
            raise ResourceExhausted(
                f"{self.waiting} gradings wait already, the most that may; try again later, or "
                "raise grading.max_waiting or grading.concurrency",
                retry_after_s=1.0,
                metadata={"fault_cause": "QUOTA"},
            )
        came = self._clock()
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        waited = self._clock() - came
        self._waits.append(waited)
        self.in_use += 1
        try:
            yield waited
        finally:
            self.in_use -= 1
            self._slots.release()
