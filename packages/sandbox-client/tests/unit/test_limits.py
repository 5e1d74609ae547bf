import asyncio
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_client.core.limits import TokenBucket, WaitRecord, WindowBucket
from sandbox_client.limiter import Limiter


def test_a_bucket_gives_its_burst_then_its_rate() -> None:
    bucket = TokenBucket(2.0, 3, now=0.0)
    assert [bucket.take(0.0) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert bucket.take(0.0) == pytest.approx(0.5)
    assert bucket.take(0.5) == 0.0
    assert bucket.take(0.5) > 0


def test_a_rate_of_zero_is_no_limit() -> None:
    bucket = TokenBucket(0.0, 1, now=0.0)
    assert all(bucket.take(0.0) == 0.0 for _ in range(1000))


@given(st.lists(st.floats(0, 3), max_size=60), st.floats(0.1, 20), st.integers(1, 5))
def test_a_bucket_never_gives_more_than_burst_and_rate(
    gaps: list[float], rate: float, burst: int
) -> None:
    bucket = TokenBucket(rate, burst, now=0.0)
    now = given_out = 0.0
    for gap in gaps:
        now += gap
        given_out += bucket.take(now) == 0.0
    assert given_out <= burst + rate * now + 1e-6


def test_a_windows_tokens_come_back_one_window_after_they_went() -> None:
    bucket = WindowBucket(2, 60.0)
    assert [bucket.take(0.0), bucket.take(10.0)] == [0.0, 0.0]
    assert bucket.take(15.0) == pytest.approx(45.0)
    assert bucket.used(59.0) == 2
    assert bucket.take(60.0) == 0.0
    assert bucket.take(61.0) == pytest.approx(9.0)


@given(st.lists(st.floats(0, 30), max_size=60), st.integers(1, 5))
def test_no_window_sees_more_than_its_limit(gaps: list[float], limit: int) -> None:
    bucket = WindowBucket(limit, 60.0)
    now = 0.0
    given_out = []
    for gap in gaps:
        now += gap
        wait_s = bucket.take(now)
        if wait_s == 0.0:
            given_out.append(now)
        else:
            # It asks for no more than is needed: then there is a token.
            assert deepcopy(bucket).take(now + wait_s + 1e-6) == 0.0
    for start in given_out:
        assert sum(start <= at < start + 60.0 for at in given_out) <= limit


def test_a_window_without_a_limit_gives_any_number() -> None:
    bucket = WindowBucket(0, 60.0)
    assert all(bucket.take(0.0) == 0.0 for _ in range(1000))


def test_waits_have_a_median_and_a_maximum() -> None:
    waits = WaitRecord(keep=3)
    assert (waits.p50_s, waits.max_s) == (0.0, 0.0)
    for wait in (9.0, 1.0, 2.0, 3.0):
        waits.add(wait)
    assert (waits.p50_s, waits.max_s) == (2.0, 3.0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_limiter_lets_in_only_so_many_and_first_come_first() -> None:
    clock = Clock()
    limiter = Limiter("things", 2, clock=clock)
    entered: list[int] = []
    leave = [asyncio.Event() for _ in range(4)]

    async def visit(number: int) -> None:
        async with limiter.slot():
            entered.append(number)
            await leave[number].wait()

    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(visit(number))
            await turn()
        assert entered == [0, 1]
        assert (limiter.status().in_use, limiter.status().waiting) == (2, 2)
        clock.now = 7.0
        leave[1].set()
        await turn()
        assert entered == [0, 1, 2]
        for event in leave:
            event.set()
    status = limiter.status()
    assert (status.in_use, status.waiting, status.wait_max_s) == (0, 0, 7.0)


async def test_whoever_gives_up_waiting_leaves_no_hole_in_the_line() -> None:
    limiter = Limiter("things", 1)
    async with limiter.slot():
        waiting = [asyncio.create_task(limiter.slot().__aenter__()) for _ in range(2)]
        await turn()
        waiting[0].cancel()
        await turn()
        assert limiter.status().waiting == 1
    await waiting[1]
    assert limiter.status().in_use == 1


async def test_a_place_given_to_one_who_is_cancelled_goes_on() -> None:
    limiter = Limiter("things", 1)
    slot = limiter.slot()
    await slot.__aenter__()
    waiting = asyncio.create_task(limiter.slot().__aenter__())
    await turn()
    await slot.__aexit__(None, None, None)
    waiting.cancel()  # the place has been handed over, the task has not run yet
    await turn()
    assert limiter.status().in_use == 0
