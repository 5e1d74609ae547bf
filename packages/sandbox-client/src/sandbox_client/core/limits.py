"""Rates, counts and the record of who waited how long. Time is always an argument."""

from collections import deque
from dataclasses import dataclass

__all__ = ["LimiterStatus", "TokenBucket", "WaitRecord", "WindowBucket"]


@dataclass(frozen=True)
class LimiterStatus:
    """One limiter at one moment. A limit of 0 means that none is set."""

    name: str
    limit: float
    in_use: float
    waiting: int = 0
    wait_p50_s: float = 0.0
    wait_max_s: float = 0.0


class TokenBucket:
    """At most `rate_per_s` events a second in the long run, `burst` at once; a rate of 0: any."""

    def __init__(self, rate_per_s: float, burst: int, *, now: float) -> None:
        if rate_per_s < 0 or burst < 1:
            raise ValueError(
                f"rate_per_s must be >= 0 and burst >= 1, got {rate_per_s} and {burst}"
            )
        self.rate_per_s = rate_per_s
        self.burst = burst
        self._tokens = float(burst)
        self._at = now

    def take(self, now: float) -> float:
        """Takes one token and returns 0, or returns the seconds until one is there."""
        if self.rate_per_s == 0:
            return 0.0
        self._refill(now)
        if self._tokens >= 1:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self.rate_per_s

    def used(self, now: float) -> float:
        """How many of the burst's tokens are spent at the moment."""
        if self.rate_per_s == 0:
            return 0.0
        self._refill(now)
        return self.burst - self._tokens

    def _refill(self, now: float) -> None:
        passed = max(0.0, now - self._at)
        self._tokens = min(float(self.burst), self._tokens + passed * self.rate_per_s)
        self._at = now


class WindowBucket:
    """A bucket of `limit` tokens, each of which comes back `window_s` after it was taken; 0: any.

    In no window are there more than `limit` events, which is how registries count; a bucket that
    fills up evenly lets through up to twice as many in its first one.
    """

    def __init__(self, limit: int, window_s: float) -> None:
        if limit < 0 or window_s <= 0:
            raise ValueError(f"limit must be >= 0 and window_s > 0, got {limit} and {window_s}")
        self.limit = limit
        self.window_s = window_s
        self._taken: deque[float] = deque()

    def take(self, now: float) -> float:
        """Takes one token and returns 0, or returns the seconds until one is there."""
        if self.limit == 0:
            return 0.0
        if self.used(now) < self.limit:
            self._taken.append(now)
            return 0.0
        return self._taken[0] + self.window_s - now

    def used(self, now: float) -> int:
        """How many tokens are out at the moment."""
        while self._taken and self._taken[0] + self.window_s <= now:
            self._taken.popleft()
        return len(self._taken)


class WaitRecord:
    """The latest waiting times of a queue, for its gauges."""

    def __init__(self, keep: int = 256) -> None:
        self._waits: deque[float] = deque(maxlen=keep)

    def add(self, wait_s: float) -> None:
        """Records one finished wait."""
        self._waits.append(wait_s)

    @property
    def p50_s(self) -> float:
        """Median of the recent waits; 0 before the first."""
        return sorted(self._waits)[len(self._waits) // 2] if self._waits else 0.0

    @property
    def max_s(self) -> float:
        """Longest of the recent waits; 0 before the first."""
        return max(self._waits, default=0.0)
