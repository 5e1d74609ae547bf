"""Deadlines: a budget of time that is passed on, never renewed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from service_kit.errors import DeadlineExceeded


class MissingDeadlineError(TypeError):
    """A unary call was made without a timeout. It is a bug of the caller, found on the first call.

    Pass `timeout=` in seconds, usually `deadline.remaining_s()`, or set `default_timeout_s` in the
    channel's config.
    """


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the monotonic clock after which nobody waits for the result any more."""

    at_s: float
    clock: Callable[[], float] = field(default=time.monotonic, repr=False, compare=False)

    @classmethod
    def after(cls, budget_s: float, *, clock: Callable[[], float] = time.monotonic) -> Deadline:
        """Return the deadline `budget_s` seconds from now."""
        return cls(clock() + budget_s, clock)

    @classmethod
    def of_call(
        cls,
        context: grpc.aio.ServicerContext[Any, Any],
        *,
        at_most_s: float,
        reserve_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> Deadline:
        """Return the deadline for the work of a handler.

        Args:
            context: Of the call being served.
            at_most_s: The service's own limit, used when the caller allows more or any time.
            reserve_s: Kept back from the caller's time, to send a useful answer in.
            clock: For tests.
        """
        return cls.after(
            min(remaining_s(context, default_s=at_most_s) - reserve_s, at_most_s), clock=clock
        )

    def remaining_s(self) -> float:
        """Return the seconds left, never below 0."""
        return max(0.0, self.at_s - self.clock())

    def within(self, limit_s: float) -> float:
        """Return a timeout for one step: the seconds left, at most `limit_s`."""
        return min(self.remaining_s(), limit_s)

    def check(self, what: str) -> None:
        """Raise `DeadlineExceeded` if no time is left for `what`."""
        if self.remaining_s() <= 0:
            raise DeadlineExceeded(f"no time left for {what}; call again with a longer timeout")


def remaining_s(context: grpc.aio.ServicerContext[Any, Any], *, default_s: float) -> float:
    """Return the seconds a served call may still take, or `default_s` if it has no deadline."""
    left: float | None = context.time_remaining()
    return default_s if left is None else left
