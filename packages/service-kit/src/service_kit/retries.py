"""Retries, for idempotent calls only.

A channel repeats by itself what the contract marks as idempotent (`option idempotency_level`) and
what failed with UNAVAILABLE; gRPC does it below the call, from a service config. `retry` is for
the rest: a caller that knows its call to be safe, and is willing to wait for as long as the
service asks it to.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import pydantic
from google.protobuf import descriptor, descriptor_pb2

from service_kit.config import Config
from service_kit.deadlines import Deadline
from service_kit.errors import ServiceError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class RetryConfig(Config):
    """How idempotent calls are repeated."""

    max_attempts: int = pydantic.Field(default=4, ge=1, le=5)
    """Tries in all, the first one included. gRPC itself allows at most 5."""

    initial_backoff_s: float = pydantic.Field(default=0.1, gt=0)
    """Longest wait before the second try; the real one is random below it."""

    max_backoff_s: float = pydantic.Field(default=2.0, gt=0)
    """Longest wait before any try, unless the service asks for more."""

    multiplier: float = pydantic.Field(default=2.0, ge=1)
    """Growth of the longest wait from try to try."""

    def backoff_s(self, failures: int, rng: random.Random) -> float:
        """Return the wait after so many failures (1, 2, ...), drawn from `rng`."""
        longest = self.initial_backoff_s * self.multiplier ** (failures - 1)
        return rng.uniform(0.0, min(longest, self.max_backoff_s))


def idempotent_methods(*contracts: descriptor.FileDescriptor) -> list[str]:
    """List the methods that the contracts mark as idempotent, as `package.Service/Method`."""
    safe = {
        descriptor_pb2.MethodOptions.NO_SIDE_EFFECTS,
        descriptor_pb2.MethodOptions.IDEMPOTENT,
    }
    return [
        f"{service.full_name}/{method.name}"
        for contract in contracts
        for service in contract.services_by_name.values()
        for method in service.methods
        if method.GetOptions().idempotency_level in safe
    ]


def service_config(methods: Iterable[str], retry: RetryConfig) -> str:
    """Return gRPC's service config (JSON) that retries the methods on UNAVAILABLE."""
    names = []
    for method in methods:
        service, _, name = method.strip("/").partition("/")
        if not service or not name:
            raise ValueError(f"expected package.Service/Method, found {method!r}")
        names.append({"service": service, "method": name})
    if not names or retry.max_attempts < 2:
        return json.dumps({})
    policy: dict[str, Any] = {
        "maxAttempts": retry.max_attempts,
        "initialBackoff": f"{retry.initial_backoff_s:.3f}s",
        "maxBackoff": f"{retry.max_backoff_s:.3f}s",
        "backoffMultiplier": retry.multiplier,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": policy}]})


async def retry(
    attempt: Callable[[Deadline], Awaitable[T]],
    *,
    deadline: Deadline,
    config: RetryConfig,
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    rng: random.Random | None = None,
) -> T:
    """Repeat an idempotent call until it succeeds, fails for good, or time or tries run out.

    Args:
        attempt: Makes one try; gets the deadline to derive its timeout from.
        deadline: Of all tries and waits together.
        config: Tries and waits. `retry_after_s` of an error is always waited for.
        sleep: For tests.
        rng: For tests.

    Raises:
        ServiceError: The last try's, when it is not retryable or nothing is left.
    """
    rng = rng or random.Random()  # noqa: S311 -- jitter
    failures = 0
    while True:
        try:
            return await attempt(deadline)
        except ServiceError as error:
            failures += 1
            wait_s = max(config.backoff_s(failures, rng), error.retry_after_s or 0.0)
            if (
                not error.retryable
                or failures >= config.max_attempts
                or wait_s >= deadline.remaining_s()
            ):
                error.add_note(f"after {failures} of at most {config.max_attempts} tries")
                raise
            logger.debug("try %d failed (%r); next in %.2f s", failures, error, wait_s)
            await sleep(wait_s)
