"""The fleet over scripted engines: placement, limits, loss and return, versions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest
from rollout_engine.engines.errors import EngineError
from rollout_engine.engines.fleet import Fleet, FleetConfig
from rollout_engine.engines.scripted import (
    Fault,
    Policy,
    ScriptedEngine,
    ScriptedReply,
    scripted_engine,
)
from rollout_engine.engines.sglang import SglangClient
from rollout_engine.policy import FinishReason, GenerateRequest, PolicyEngine
from rollout_engine.types import Sampling, VersionSpan
from service_kit.errors import Reason, ServiceError

FAST: dict[str, Any] = {"check_interval_s": 0.05, "first_retry_s": 0.02, "longest_retry_s": 0.1}
FAST |= {"busy_wait_s": 0.001}


def request(session: str = "s", **changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {
        "request_id": f"{session}-turn",
        "session": session,
        "input_ids": np.array([1, 2, 3], np.int32),
        "max_new_tokens": 4,
        "sampling": Sampling(),
        "seed": 5,
        "stop_token_ids": (9,),
        "min_version": 0,
        "pin_version": 0,
        "timeout_s": 20.0,
    }
    return GenerateRequest(**(fields | changes))


@asynccontextmanager
async def fleet_of(
    *policies: Policy, version: str = "1", **settings: Any
) -> AsyncIterator[tuple[Fleet, list[ScriptedEngine], list[str]]]:
    async with AsyncExitStack() as stack:
        served = [
            await stack.enter_async_context(scripted_engine(policy, weight_version=version))
            for policy in policies
        ]
        urls = [url for url, _ in served]
        config = FleetConfig(urls=tuple(urls), **(FAST | settings))
        fleet = await stack.enter_async_context(Fleet(config))
        await fleet.await_version()
        yield fleet, [engine for _, engine in served], urls


def answer(_: Any) -> list[int]:
    return [7, 8, 9]


def hang(_: Any) -> ScriptedReply:
    return ScriptedReply(fault=Fault.HANG)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 -- the other side has no event of ours
            await asyncio.sleep(0.002)


async def test_a_turn_comes_back_as_arrays_with_versions() -> None:
    async with fleet_of(answer) as (fleet, engines, _):
        made: PolicyEngine = fleet
        result = await made.generate(request(sampling=Sampling(top_k=5, top_p=0.9)))
        assert result.output_ids.tolist() == [7, 8, 9]
        assert result.finish is FinishReason.STOP
        assert result.versions == (VersionSpan(0, 3, 1, 1),)
        assert len(result.logprobs) == 3
        (seen,) = engines[0].requests
        assert list(seen.input_ids) == [1, 2, 3]
        assert seen.return_logprob
        sampling = seen.sampling
        assert (sampling.top_k, sampling.top_p, sampling.sampling_seed) == (5, 0.9, 5)
        assert (sampling.max_new_tokens, sampling.stop_token_ids) == (4, (9,))


async def test_sessions_are_spread_and_stay() -> None:
    async with fleet_of(answer, answer) as (fleet, engines, _):
        for _turn in range(3):
            for session in "abcd":
                await fleet.generate(request(session))
        sessions = [{r.rid.split("-")[0] for r in engine.requests} for engine in engines]
        assert sorted(map(len, sessions)) == [2, 2]
        assert not sessions[0] & sessions[1]
        for session in "abcd":
            fleet.end_session(session)


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.DISCONNECT, Fault.GARBAGE])
async def test_a_failing_engine_is_dropped_and_its_request_served_elsewhere(fault: Fault) -> None:
    async with fleet_of(
        lambda _: ScriptedReply(fault=fault),
        answer,
        check_interval_s=60,
        first_retry_s=50,
        longest_retry_s=60,
    ) as (fleet, engines, _):
        await until(lambda: all(s.healthy for s in fleet.statuses()))
        result = await fleet.generate(request())
        assert result.output_ids.tolist() == [7, 8, 9]
        assert [status.healthy for status in fleet.statuses()] == [False, True]
        await fleet.generate(request("other"))
        assert len(engines[0].requests) == 1


async def test_a_lost_engine_comes_back_after_a_good_check() -> None:
    async with fleet_of(answer, answer) as (fleet, engines, _):
        await until(lambda: all(s.healthy for s in fleet.statuses()))
        engines[0].sick = "poisoned"
        await until(lambda: [s.healthy for s in fleet.statuses()] == [False, True])
        await fleet.generate(request("a"))
        assert len(engines[1].requests) == 1
        engines[0].sick = ""
        await until(lambda: all(s.healthy for s in fleet.statuses()))


async def test_an_engine_that_comes_back_with_old_weights_stays_out() -> None:
    async with fleet_of(answer, answer) as (fleet, engines, urls):
        await until(lambda: all(s.healthy for s in fleet.statuses()))
        engines[0].sick = "restarting"
        await until(lambda: not fleet.statuses()[0].healthy)
        engines[1].label = "2"
        await until(lambda: fleet.statuses()[1].weight_version == "2")
        engines[0].sick = ""
        checks = fleet.checks_of(urls[0])
        await until(lambda: fleet.checks_of(urls[0]) > checks + 2)
        assert not fleet.statuses()[0].healthy
        engines[0].label = "2"
        await until(lambda: fleet.statuses()[0].healthy)


async def test_an_engine_that_is_ahead_may_come_back_if_that_version_is_expected() -> None:
    async with fleet_of(answer, answer) as (fleet, engines, _):
        await until(lambda: all(s.healthy for s in fleet.statuses()))
        engines[0].sick = "restarting"
        await until(lambda: not fleet.statuses()[0].healthy)
        engines[0].label = "3"
        engines[0].sick = ""
        fleet.expect_version(3)
        await until(lambda: fleet.statuses()[0].healthy)


async def test_the_limit_of_an_engine_makes_a_queue_that_can_be_seen() -> None:
    async with fleet_of(hang, max_in_flight=2) as (fleet, engines, _):
        calls = [asyncio.create_task(fleet.generate(request(str(n)))) for n in range(5)]
        await until(lambda: engines[0].load().running == 2)
        limiter = fleet.limiters()[0]
        assert (limiter.limit, limiter.in_use, limiter.waiting) == (2, 2, 3)
        engines[0].policy = answer
        calls[0].cancel()
        await until(lambda: sum(call.done() for call in calls) == 4)
        assert fleet.limiters()[0].waiting == 0
        calls[1].cancel()
        await asyncio.wait(calls)
        assert fleet.limiters()[0].in_use == 0
        assert fleet.limiters()[0].wait_max_s > 0


async def test_a_request_waits_for_the_version_it_needs() -> None:
    async with fleet_of(answer) as (fleet, engines, _):
        call = asyncio.create_task(fleet.generate(request(min_version=2)))
        waiting = asyncio.create_task(fleet.await_version(minimum=2))
        await until(lambda: fleet.limiters()[-1].waiting == 1)
        assert not waiting.done()
        engines[0].label = "2"
        await waiting
        assert (await call).versions == (VersionSpan(0, 3, 2, 2),)
        await fleet.await_version(exactly=2)


async def test_a_version_that_is_past_is_refused_at_once() -> None:
    async with fleet_of(answer, version="5") as (fleet, _, _):
        for call in (fleet.generate(request(pin_version=4)), fleet.await_version(exactly=4)):
            with pytest.raises(ServiceError, match="it will not come back") as caught:
                await call
            assert caught.value.reason is Reason.VERSION_NOT_READY
            assert not caught.value.retryable


async def test_a_version_that_passes_while_a_request_waits_ends_the_wait() -> None:
    async with fleet_of(answer) as (fleet, engines, _):
        call = asyncio.create_task(fleet.generate(request(pin_version=2)))
        await until(lambda: fleet.limiters()[-1].waiting == 1)
        engines[0].label = "3"
        with pytest.raises(ServiceError, match="it will not come back"):
            await call
        assert fleet.limiters()[-1].waiting == 0


async def test_without_any_engine_the_deadline_ends_the_wait_and_names_the_reason() -> None:
    async with fleet_of(answer) as (fleet, engines, urls):
        engines[0].sick = "poisoned"
        await until(lambda: not fleet.statuses()[0].healthy)
        with pytest.raises(ServiceError, match="poisoned") as caught:
            await fleet.generate(request(timeout_s=0.05))
        assert caught.value.reason is Reason.DEADLINE_EXCEEDED
        assert urls[0] in caught.value.message
        engines[0].sick = ""
        await fleet.generate(request())


async def test_a_generation_that_hangs_ends_with_its_deadline_and_nothing_left() -> None:
    async with fleet_of(hang) as (fleet, engines, _):
        with pytest.raises(ServiceError) as caught:
            await fleet.generate(request(timeout_s=0.1))
        assert caught.value.reason is Reason.DEADLINE_EXCEEDED
        assert engines[0].load().running == 0
        assert fleet.limiters()[0].in_use == 0
        assert fleet.statuses()[0].healthy


async def test_a_busy_engine_is_tried_again_and_not_dropped() -> None:
    replies = [ScriptedReply(fault=Fault.BUSY)] * 2 + [ScriptedReply(output_ids=[9])]
    async with fleet_of(lambda _: replies.pop(0)) as (fleet, engines, _):
        assert (await fleet.generate(request())).output_ids.tolist() == [9]
        assert len({r.rid for r in engines[0].requests}) == 3
        replies += [ScriptedReply(fault=Fault.BUSY)] * 4
        with pytest.raises(ServiceError) as caught:
            await fleet.generate(request())
        assert caught.value.reason is Reason.QUOTA_EXHAUSTED
        assert caught.value.retryable
        assert fleet.statuses()[0].healthy


async def test_a_request_that_no_engine_will_ever_take_fails_at_once() -> None:
    async with fleet_of(answer) as (fleet, engines, _):
        long = np.ones(1 << 16, np.int32)
        with pytest.raises(ServiceError, match="longer than the model's context") as caught:
            await fleet.generate(request(input_ids=long))
        assert caught.value.reason is Reason.INVALID_ARGUMENT
        assert not caught.value.retryable
        assert len(engines[0].requests) == 1
        assert fleet.statuses()[0].healthy


async def test_an_aborted_generation_is_made_again() -> None:
    async with fleet_of(hang) as (fleet, engines, _):
        call = asyncio.create_task(fleet.generate(request()))
        await until(lambda: engines[0].load().running)
        engines[0].policy = answer
        engines[0].abort(None)
        assert (await call).output_ids.tolist() == [7, 8, 9]


async def test_leaving_the_fleet_ends_its_checks_and_connections() -> None:
    async with fleet_of(answer) as (fleet, _, urls):
        await fleet.generate(request())
    assert all(watch.done() for watch in fleet._watches)
    async with SglangClient(urls[0]) as client:
        with pytest.raises(EngineError):
            await client.check_health(timeout_s=1)
