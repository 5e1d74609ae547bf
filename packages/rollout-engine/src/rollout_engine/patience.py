"""Waiting out a peer that restarts or is full, instead of failing the attempt."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from service_kit.errors import Reason, ServiceError

from rollout_engine.core.retry import Backoff

logger = logging.getLogger(__name__)
T = TypeVar("T")

_PASSING = frozenset({Reason.UNAVAILABLE, Reason.DRAINING, Reason.QUOTA_EXHAUSTED})


@dataclass(frozen=True)
class Patience:
    """Repeats what is safe to repeat while its peer cannot be reached or is full.

    Attributes:
        patience_s: After so long the error stands. 0: no repetition.
    """

    patience_s: float
    backoff: Backoff = field(default_factory=lambda: Backoff(0.2, 2.0, 5.0))
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep
    rng: random.Random = field(default_factory=random.Random)

    async def call(self, attempt: Callable[[], Awaitable[T]], what: str) -> T:
        """Call until it succeeds, fails for good, or patience ends.

        Args:
            attempt: Makes one try; has to be idempotent.
            what: Names it in the log.

        Raises:
            ServiceError: The last try's.

        """
        until_s = self.clock() + self.patience_s
        failures = 0
        while True:
            try:
                return await attempt()
            except ServiceError as error:
                failures += 1
                wait_s = max(
                    self.backoff.delay_s(failures, self.rng.random()), error.retry_after_s or 0.0
                )
                if error.reason not in _PASSING or self.clock() + wait_s > until_s:
                    raise
                logger.info("%s: %s; again in %.1f s", what, error, wait_s)
                await self.sleep(wait_s)


__all__ = ["Patience"]
