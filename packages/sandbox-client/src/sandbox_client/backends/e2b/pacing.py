"""When E2B may be asked for another sandbox. Pure: time is an argument."""

from sandbox_client.core.limits import TokenBucket

__all__ = ["CreatePacer"]


class CreatePacer:
    """A token bucket that E2B's own rate limit closes for a while."""

    def __init__(self, rate_per_s: float, burst: int, *, pause_s: float, now: float) -> None:
        self._bucket = TokenBucket(rate_per_s, burst, now=now)
        self._pause_s = pause_s
        self._closed_until = now

    def take(self, now: float) -> float:
        """Takes leave to create one sandbox and returns 0, or returns the seconds to wait."""
        if now < self._closed_until:
            return self._closed_until - now
        return self._bucket.take(now)

    def refused(self, now: float) -> float:
        """E2B has refused a create by its rate limit; returns the seconds until the next may go."""
        self._closed_until = max(self._closed_until, now + self._pause_s)
        return self._closed_until - now

    def used(self, now: float) -> float:
        """How many of the burst's tokens are spent."""
        return self._bucket.used(now)
