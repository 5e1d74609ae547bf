"""Who may use a scarce thing now, who waits, and for how long they have waited."""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_REMEMBERED_WAITS = 512


@dataclass(frozen=True, slots=True)
class LimiterStatus:
    """A limiter's figures.

    Attributes:
        limit: How many may hold a slot at once; 0: no limit.
        wait_p50_s: Median wait of the latest grants, seconds.
        wait_max_s: Longest wait of the latest grants, or of somebody who still waits.
    """

    name: str
    limit: int
    in_use: int
    waiting: int
    wait_p50_s: float
    wait_max_s: float


class SlotQueue(Generic[T]):
    """Slots for at most `limit` holders; the waiting one of lowest priority number comes first.

    Time is an argument, in seconds of any monotonic clock. Equal priorities are served in the order
    of their requests.
    """

    def __init__(self, name: str, limit: int) -> None:
        if limit < 0:
            raise ValueError(f"limit of {name} must be >= 0 (0: none), got {limit}")
        self.name = name
        self.limit = limit
        self._holders: set[T] = set()
        self._waiting: dict[T, float] = {}
        self._heap: list[tuple[tuple[int, ...], int, T]] = []
        self._arrivals = 0
        self._waits: deque[float] = deque(maxlen=_REMEMBERED_WAITS)

    @property
    def in_use(self) -> int:
        """How many hold a slot."""
        return len(self._holders)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def holds(self, ticket: T) -> bool:
        """Whether the ticket holds a slot."""
        return ticket in self._holders

    def request(self, ticket: T, priority: tuple[int, ...], now_s: float) -> bool:
        """Ask for a slot; whether it is granted at once. Else a later `release` grants it."""
        if ticket in self._holders or ticket in self._waiting:
            raise ValueError(f"{self.name}: ticket {ticket!r} is in use")
        if self._free and not self._waiting:
            self._grant(ticket, 0.0)
            return True
        self._waiting[ticket] = now_s
        self._arrivals += 1
        heapq.heappush(self._heap, (priority, self._arrivals, ticket))
        return False

    def withdraw(self, ticket: T) -> None:
        """Stop waiting. A ticket that does not wait is fine."""
        self._waiting.pop(ticket, None)

    def release(self, ticket: T, now_s: float) -> list[T]:
        """Give a slot back; which waiting tickets hold one now."""
        if ticket not in self._holders:
            raise ValueError(f"{self.name}: ticket {ticket!r} holds no slot")
        self._holders.remove(ticket)
        granted: list[T] = []
        while self._free and self._waiting:
            _, _, head = heapq.heappop(self._heap)
            since_s = self._waiting.pop(head, None)
            if since_s is not None:
                self._grant(head, now_s - since_s)
                granted.append(head)
        return granted

    def status(self, now_s: float) -> LimiterStatus:
        """Give the figures as of now."""
        waits = list(self._waits)
        still = [now_s - since_s for since_s in self._waiting.values()]
        return LimiterStatus(
            name=self.name,
            limit=self.limit,
            in_use=self.in_use,
            waiting=self.waiting,
            wait_p50_s=statistics.median(waits) if waits else 0.0,
            wait_max_s=max((*waits, *still), default=0.0),
        )

    @property
    def _free(self) -> bool:
        return self.limit == 0 or len(self._holders) < self.limit

    def _grant(self, ticket: T, waited_s: float) -> None:
        self._holders.add(ticket)
        self._waits.append(waited_s)


__all__ = ["LimiterStatus", "SlotQueue"]
