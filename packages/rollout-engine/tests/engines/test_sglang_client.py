"""The client against a scripted engine: deadlines, faults, what may be tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from rollout_engine.engines.errors import (
    BadReply,
    EngineBusy,
    EngineError,
    EnginePoisoned,
    EngineTimeout,
    EngineUnavailable,
    GenerationAborted,
    InvalidRequest,
    WeightUpdateFailed,
)
from rollout_engine.engines.scripted import Fault, ScriptedReply, scripted_engine
from rollout_engine.engines.sglang import SglangClient
from rollout_engine.engines.types import (
    EngineRequest,
    Finish,
    FinishKind,
    LabelSpan,
    PauseMode,
    SamplingParams,
)

T = 30.0


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(T):
        while not holds():  # noqa: ASYNC110 -- the other side has no event of ours
            await asyncio.sleep(0.002)


def request(rid: str = "r", **changes: Any) -> EngineRequest:
    sampling = SamplingParams(**({"max_new_tokens": 4} | changes))
    return EngineRequest(rid=rid, input_ids=[1, 2, 3], sampling=sampling)


async def test_a_policy_answers_with_tokens() -> None:
    async with (
        scripted_engine(lambda r: [len(r.input_ids), 7, 8, 9, 10]) as (url, engine),
        SglangClient(url + "/") as client,
    ):
        done = await client.generate(request(), timeout_s=T)
        assert done.output_ids == (3, 7, 8, 9)
        assert done.finish == Finish(FinishKind.LENGTH)
        assert done.version_spans == (LabelSpan("default", 0, 4),)
        done = await client.generate(request(stop_token_ids=(7,)), timeout_s=T)
        assert done.output_ids == (3, 7)
        assert done.finish == Finish(FinishKind.STOP, matched=7)
        assert done.cached_tokens == 2
        assert engine.requests[1] == request(stop_token_ids=(7,))


@pytest.mark.parametrize(
    ("fault", "error", "retryable", "at_fault"),
    [
        (Fault.ERROR, EngineUnavailable, True, True),
        (Fault.BUSY, EngineBusy, True, False),
        (Fault.DISCONNECT, EngineUnavailable, True, True),
        (Fault.GARBAGE, BadReply, True, True),
        (Fault.HANG, EngineTimeout, True, False),
    ],
)
async def test_each_fault_has_its_own_error(
    fault: Fault, error: type[EngineError], retryable: bool, at_fault: bool
) -> None:
    timeout_s = 0.05 if fault is Fault.HANG else T
    async with (
        scripted_engine(lambda _: ScriptedReply(fault=fault)) as (url, engine),
        SglangClient(url) as client,
    ):
        with pytest.raises(error) as caught:
            await client.generate(request(), timeout_s=timeout_s)
        assert type(caught.value) is error
        assert (caught.value.retryable, caught.value.engine_at_fault) == (retryable, at_fault)
        assert caught.value.engine == url
        # A request that hung was aborted on the way out.
        assert engine.load().running == 0


async def test_nobody_there_is_unavailable() -> None:
    async with scripted_engine(lambda _: [1]) as (url, _):
        pass
    async with SglangClient(url) as client:
        with pytest.raises(EngineUnavailable, match="/health: ClientConnectorError"):
            await client.check_health(timeout_s=T)


async def test_a_request_that_somebody_else_aborts_says_how_far_it_got() -> None:
    async with (
        scripted_engine(lambda _: ScriptedReply(fault=Fault.HANG)) as (url, engine),
        SglangClient(url) as client,
    ):
        call = asyncio.create_task(client.generate(request(), timeout_s=T))
        await until(lambda: engine.load().running)
        await client.abort("r", timeout_s=T)
        with pytest.raises(GenerationAborted, match="aborted after 0 tokens: Aborted"):
            await call


async def test_a_cancelled_request_is_aborted_at_the_engine() -> None:
    async with (
        scripted_engine(lambda _: ScriptedReply(fault=Fault.HANG)) as (url, engine),
        SglangClient(url) as client,
    ):
        call = asyncio.create_task(client.generate(request(), timeout_s=T))
        await until(lambda: engine.load().running)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert engine.load().running == 0


async def test_a_pause_holds_answers_and_an_update_splits_their_versions() -> None:
    async with (
        scripted_engine(lambda _: ScriptedReply(output_ids=[1, 2, 3, 4])) as (url, engine),
        SglangClient(url) as client,
    ):
        await client.pause(PauseMode.IN_PLACE, timeout_s=T)
        assert engine.paused
        call = asyncio.create_task(client.generate(request(), timeout_s=T))
        await until(lambda: engine.load().running)
        assert await client.update_weights_from_disk("/weights/2", "2", timeout_s=T) == 1
        await client.resume(timeout_s=T)
        done = await call
        assert done.version_spans == (LabelSpan("default", 0, 2), LabelSpan("2", 2, 4))
        assert done.kv_spans == (LabelSpan("default", 0, 4),)
        assert engine.updates[0].model_path == "/weights/2"
        info = await client.model_info(timeout_s=T)
        assert (info.model_path, info.weight_version) == ("/weights/2", "2")


async def test_a_refused_update_leaves_the_label() -> None:
    async with scripted_engine(lambda _: [1]) as (url, engine), SglangClient(url) as client:
        engine.fail_updates = "disk full"
        with pytest.raises(WeightUpdateFailed, match="disk full"):
            await client.update_weights_from_disk("/w", "2", timeout_s=T)
        assert engine.label == "default"
        await client.set_weight_version("3", timeout_s=T)
        assert engine.label == "3"


async def test_a_sick_engine_fails_its_health_check_and_its_requests() -> None:
    async with scripted_engine(lambda _: [1]) as (url, engine), SglangClient(url) as client:
        engine.sick = "poisoned: do a full load"
        with pytest.raises(EnginePoisoned):
            await client.check_health(timeout_s=T)
        with pytest.raises(EnginePoisoned):
            await client.generate(request(), timeout_s=T)
        engine.sick = "tired"
        with pytest.raises(EngineUnavailable, match="status 503: tired"):
            await client.check_health(timeout_s=T)


async def test_a_flush_that_is_not_done_is_reported() -> None:
    async with (
        scripted_engine(lambda _: ScriptedReply(fault=Fault.HANG)) as (url, engine),
        SglangClient(url) as client,
    ):
        assert await client.flush_cache(timeout_s=T)
        call = asyncio.create_task(client.generate(request(), timeout_s=T))
        await until(lambda: engine.load().running)
        assert not await client.flush_cache(timeout_s=T)
        await client.abort(None, timeout_s=T)
        with pytest.raises(GenerationAborted):
            await call


async def test_every_call_has_a_deadline() -> None:
    over = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        await over.wait()
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", hang)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    short: Any = {"timeout_s": 0.01}
    async with SglangClient(f"http://127.0.0.1:{port}") as client:
        calls = [
            client.check_health(**short),
            client.model_info(**short),
            client.server_info(**short),
            client.load(**short),
            client.weights_checksum(**short),
            client.flush_cache(**short),
            client.pause(PauseMode.RETRACT, **short),
            client.resume(**short),
            client.abort("r", **short),
            client.set_weight_version("2", **short),
            client.update_weights_from_disk("/w", "2", **short),
        ]
        for call in calls:
            with pytest.raises(EngineTimeout):
                await call
    over.set()
    await runner.cleanup()


async def test_one_call_serves_one_sample() -> None:
    async with SglangClient("http://127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest, match="one sample"):
            await client.generate(request(n=2), timeout_s=T)


async def test_replies_that_are_not_the_apis_are_bad() -> None:
    async def text(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    async def array(_: web.Request) -> web.Response:
        return web.json_response([1])

    app = web.Application()
    app.router.add_get("/model_info", text)
    app.router.add_get("/v1/loads", array)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with SglangClient(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
        with pytest.raises(BadReply, match="not JSON"):
            await client.model_info(timeout_s=T)
        with pytest.raises(BadReply, match="expected an object, found list"):
            await client.load(timeout_s=T)
    await runner.cleanup()
