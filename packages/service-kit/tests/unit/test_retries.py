from __future__ import annotations

import json
import random

import pytest
from service_kit import (
    Deadline,
    NotFound,
    ResourceExhausted,
    RetryConfig,
    ServiceError,
    Unavailable,
    retry,
)
from service_kit.retries import service_config


class World:
    """A clock that only sleeping moves, and a peer that fails as told."""

    def __init__(self, *failures: ServiceError) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []
        self.failures = list(failures)
        self.calls = 0

    async def sleep(self, wait_s: float) -> None:
        self.slept.append(wait_s)
        self.now_s += wait_s

    async def attempt(self, deadline: Deadline) -> str:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return "done"

    async def run(self, *, budget_s: float = 1000, config: RetryConfig | None = None) -> str:
        return await retry(
            self.attempt,
            deadline=Deadline.after(budget_s, clock=lambda: self.now_s),
            config=config or RetryConfig(),
            sleep=self.sleep,
            rng=random.Random(0),
        )


async def test_success_at_once_waits_for_nothing() -> None:
    world = World()
    assert await world.run() == "done"
    assert world.slept == []


async def test_retryable_failures_are_repeated_with_growing_random_waits() -> None:
    config = RetryConfig(max_attempts=5, initial_backoff_s=1, max_backoff_s=3, multiplier=2)
    world = World(*[Unavailable("x")] * 4)
    assert await world.run(config=config) == "done"
    for wait_s, longest_s in zip(world.slept, (1, 2, 3, 3), strict=True):
        assert 0 <= wait_s <= longest_s
    assert len(set(world.slept)) == 4


async def test_the_wait_a_service_asks_for_is_kept() -> None:
    world = World(ResourceExhausted("full", retry_after_s=7.0))
    assert await world.run() == "done"
    assert world.slept == [7.0]


async def test_a_hopeless_failure_is_raised_at_once() -> None:
    world = World(NotFound("gone"))
    with pytest.raises(NotFound):
        await world.run()
    assert world.calls == 1


async def test_tries_are_bounded_and_counted_in_the_error() -> None:
    world = World(*[Unavailable("x")] * 9)
    with pytest.raises(Unavailable) as failed:
        await world.run(config=RetryConfig(max_attempts=3))
    assert world.calls == 3
    assert failed.value.__notes__ == ["after 3 of at most 3 tries"]


async def test_no_wait_goes_beyond_the_deadline() -> None:
    world = World(*[ResourceExhausted("full", retry_after_s=4.0)] * 9)
    with pytest.raises(ResourceExhausted):
        await world.run(budget_s=10, config=RetryConfig(max_attempts=5))
    assert world.slept == [4.0, 4.0]
    assert world.now_s < 10


def test_the_service_config_names_exactly_the_given_methods() -> None:
    config = json.loads(service_config(["a.v1.S/M", "/a.v1.S/N"], RetryConfig(max_attempts=3)))
    (entry,) = config["methodConfig"]
    assert entry["name"] == [
        {"service": "a.v1.S", "method": "M"},
        {"service": "a.v1.S", "method": "N"},
    ]
    assert entry["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]
    assert entry["retryPolicy"]["maxAttempts"] == 3


def test_nothing_to_retry_means_no_policy() -> None:
    assert json.loads(service_config([], RetryConfig())) == {}
    assert json.loads(service_config(["a.S/M"], RetryConfig(max_attempts=1))) == {}


def test_a_malformed_method_name_is_refused() -> None:
    # An entry with a service alone would retry all of its methods.
    for wrong in ("a.v1.S", "a.v1.S/", "", "/"):
        with pytest.raises(ValueError, match=r"package\.Service/Method"):
            service_config([wrong], RetryConfig())
