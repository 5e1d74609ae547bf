"""A limiter that callers wait in line for, with its queue and its waits in view."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from sandbox_client.core.limits import LimiterStatus, WaitRecord
from sandbox_client.errors import QuotaExhausted

__all__ = ["Limiter", "Quota"]


class Limiter:
    """Lets at most `limit` holders in at once, first come, first served."""

    def __init__(
        self, name: str, limit: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.limit = limit
        self._clock = clock
        self._in_use = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._waits = WaitRecord()

    @property
    def busy(self) -> bool:
        """Whether anybody is in."""
        return self._in_use > 0

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Waits for a place and holds it."""
        if self._in_use < self.limit and not self._waiting:
            self._in_use += 1
            self._waits.add(0.0)
        else:
            await self._wait()
        try:
            yield
        finally:
            self._leave()

    async def _wait(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        began = self._clock()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()  # the place was already ours
            else:
                self._waiting.remove(turn)
            raise
        self._waits.add(self._clock() - began)

    def _leave(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)  # the place passes on
                return
        self._in_use -= 1

    def status(self) -> LimiterStatus:
        """The limiter at this moment."""
        return LimiterStatus(
            self.name,
            float(self.limit),
            float(self._in_use),
            len(self._waiting),
            self._waits.p50_s,
            self._waits.max_s,
        )


class Quota:
    """An amount that callers take pieces of; above it they are refused, not made to wait."""

    def __init__(self, name: str, limit: int, retry_after_s: float) -> None:
        self.name = name
        self.limit = limit
        self._retry_after_s = retry_after_s
        self._in_use = 0

    @property
    def left(self) -> int:
        """How much may still be taken."""
        return self.limit - self._in_use

    def refusal(self) -> QuotaExhausted:
        """What a caller is told who would take too much."""
        return QuotaExhausted(
            f"limits.{self.name} allows {self.limit}, of which {self._in_use} are in use",
            retry_after_s=self._retry_after_s,
        )

    @contextlib.contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yields what takes so much more; all of it is given back at the end.

        Raises:
            QuotaExhausted: from taking, when it is used up.
        """
        taken = 0

        def take(amount: int) -> None:
            nonlocal taken
            if amount > self.left:
                raise self.refusal()
            taken += amount
            self._in_use += amount

        try:
            yield take
        finally:
            self._in_use -= taken

    def status(self) -> LimiterStatus:
        """The quota at this moment."""
        return LimiterStatus(self.name, float(self.limit), float(self._in_use))
