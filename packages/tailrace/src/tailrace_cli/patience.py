"""Calls that go on while a service is being restarted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from service_kit.errors import ServiceError

log = logging.getLogger(__name__)
T = TypeVar("T")

PATIENCE_S = 180.0
"""How long a service may be away, being restarted, before a command gives up."""
RETRY_EVERY_S = 0.5


class Patience:
    """Allows failures for a while, counted from the last success."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._last_success_s = clock()

    def renew(self) -> None:
        """Something worked."""
        self._last_success_s = self._clock()

    async def after(self, error: ServiceError) -> None:
        """Waits before the next try.

        Raises:
            ServiceError: `error`, when a retry cannot help or patience is at its end.
        """
        if not error.retryable or self._clock() - self._last_success_s > PATIENCE_S:
            raise error
        log.info("%s: %s; trying again", self._what, error)
        await asyncio.sleep(max(RETRY_EVERY_S, error.retry_after_s or 0.0))


async def patiently(what: str, attempt: Callable[[], Awaitable[T]]) -> T:
    """Repeats an idempotent call while its service is being restarted."""
    patience = Patience(what)
    while True:
        try:
            return await attempt()
        except ServiceError as error:
            await patience.after(error)
