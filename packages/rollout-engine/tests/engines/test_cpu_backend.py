"""The embedded engine behind HTTP: what goes beyond SGLang's API or its happy paths."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from rollout_engine.engines import api_generate
from rollout_engine.engines.api import engine_app
from rollout_engine.engines.cpu.backend import CpuBackend
from rollout_engine.engines.cpu.config import CpuEngineConfig
from rollout_engine.engines.cpu.engine import CpuEngine
from rollout_engine.engines.cpu.main import serve_engine
from rollout_engine.engines.cpu.spec import read_spec
from rollout_engine.engines.cpu.weights import load_weights
from rollout_engine.engines.errors import (
    EngineBusy,
    EnginePoisoned,
    EngineTimeout,
    InvalidRequest,
    WeightUpdateFailed,
)
from rollout_engine.engines.http_server import listen, running, url_of
from rollout_engine.engines.sglang import SglangClient
from rollout_engine.engines.types import EngineRequest, SamplingParams
from service_kit.errors import StartupError

T = 60.0


@asynccontextmanager
async def serving(
    model: Path, **settings: Any
) -> AsyncIterator[tuple[SglangClient, CpuEngine, str]]:
    config = CpuEngineConfig(model=model, **({"context_tokens": 256} | settings))
    weights = load_weights(model, read_spec(model), getattr(torch, config.dtype))
    engine = CpuEngine(config, weights, time.monotonic)
    backend = CpuBackend(engine, model)
    sock = listen("127.0.0.1", 0)
    url = url_of(sock)
    async with (
        running(engine_app(backend), sock, background=[backend.run()]),
        SglangClient(url) as client,
    ):
        yield client, engine, url


def request(rid: str, count: int = 8, **sampling: Any) -> EngineRequest:
    params = SamplingParams(max_new_tokens=count, ignore_eos=True, **sampling)
    return EngineRequest(rid=rid, input_ids=[1, 2, 3], sampling=params)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(T):
        while not holds():  # noqa: ASYNC110 -- the other side has no event of ours
            await asyncio.sleep(0.002)


async def until_running(engine: CpuEngine) -> None:
    await until(lambda: engine.load(0.0).running)


async def test_requests_in_flight_survive_an_update_without_a_pause(
    dense: Path, dense_b: Path
) -> None:
    async with serving(dense) as (client, engine, _):
        calls = [
            asyncio.create_task(client.generate(request(str(n), 240), timeout_s=T))
            for n in range(6)
        ]
        await until_running(engine)
        await client.update_weights_from_disk(str(dense_b), "2", timeout_s=T)
        for call in calls:
            done = await call
            assert len(done.output_ids) == 240
            assert done.kv_spans == done.version_spans
            assert done.version_spans[-1].version == "2"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
async def test_an_update_with_another_root_hash_is_refused(
    dense: Path, dense_b: Path, dtype: str
) -> None:
    expected = load_weights(dense_b, read_spec(dense_b)).checksum().root_hash
    async with (
        serving(dense, dtype=dtype) as (client, engine, url),
        aiohttp.ClientSession() as session,
    ):
        body = {"model_path": str(dense_b), "weight_version": "2", "root_hash": "0" * 32}
        async with session.post(f"{url}/update_weights_from_disk", json=body) as reply:
            assert reply.status == 400
            assert "expected weights with root hash 000" in (await reply.json())["message"]
        assert engine.label == "default"
        body["root_hash"] = expected
        async with session.post(f"{url}/update_weights_from_disk", json=body) as reply:
            assert reply.status == 200
        assert (await client.weights_checksum(timeout_s=T)).root_hash == expected


async def test_weights_of_another_model_are_refused_by_their_difference(
    dense: Path, moe: Path
) -> None:
    async with serving(dense) as (client, _, _):
        with pytest.raises(WeightUpdateFailed, match="differ in model_type qwen3 and qwen3_moe"):
            await client.update_weights_from_disk(str(moe), "2", timeout_s=T)
        await client.generate(request("r"), timeout_s=T)


async def test_a_poisoned_engine_says_so_everywhere_and_recovers_by_a_full_load(
    dense: Path, dense_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(dense) as (client, engine, _):
        call = asyncio.create_task(client.generate(request("r", 240), timeout_s=T))
        await until_running(engine)

        def fail(label: str) -> None:
            raise RuntimeError("power cut")

        with monkeypatch.context() as patch:
            patch.setattr(engine, "_set_label", fail)
            with pytest.raises(EnginePoisoned, match="half way"):
                await client.update_weights_from_disk(str(dense_b), "2", timeout_s=T)
        with pytest.raises(EnginePoisoned):
            await call
        with pytest.raises(EnginePoisoned):
            await client.check_health(timeout_s=T)
        with pytest.raises(EnginePoisoned):
            await client.generate(request("s"), timeout_s=T)
        assert (await client.model_info(timeout_s=T)).weight_version == "poisoned"
        with pytest.raises(WeightUpdateFailed):
            await client.update_weights_from_disk("/nowhere", "3", timeout_s=T)
        with pytest.raises(EnginePoisoned):
            await client.check_health(timeout_s=T)
        await client.update_weights_from_disk(str(dense_b), "4", timeout_s=T)
        await client.check_health(timeout_s=T)
        assert (await client.generate(request("t"), timeout_s=T)).weight_version == "4"


async def test_a_step_that_fails_poisons_the_engine(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(dense) as (client, engine, _):

        def fail() -> None:
            raise MemoryError("no more")

        with monkeypatch.context() as patch:
            patch.setattr(engine, "_advance", fail)
            with pytest.raises(EnginePoisoned, match="a step failed"):
                await client.generate(request("r"), timeout_s=T)
        with pytest.raises(EnginePoisoned):
            await client.check_health(timeout_s=T)
        await client.update_weights_from_disk(str(dense), "2", timeout_s=T)
        await client.generate(request("s"), timeout_s=T)


async def test_a_call_that_runs_out_of_time_is_aborted_at_the_engine(dense: Path) -> None:
    async with serving(dense, max_running_requests=1) as (client, engine, _):
        engine.paused = True
        with pytest.raises(EngineTimeout, match=r"no answer within 0\.05 s"):
            await client.generate(request("r", 200), timeout_s=0.05)
        assert engine.in_flight == 0


async def test_a_cancelled_call_is_aborted_at_the_engine(dense: Path) -> None:
    async with serving(dense) as (client, engine, _):
        call = asyncio.create_task(client.generate(request("r", 240), timeout_s=T))
        await until_running(engine)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert engine.in_flight == 0


async def test_a_client_that_vanishes_is_noticed(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_generate, "_WATCH_AFTER_S", 0.01)
    async with serving(dense) as (_, engine, url):
        engine.paused = True
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 100}}
        for stream in (False, True):
            async with aiohttp.ClientSession() as session:
                call = asyncio.create_task(
                    session.post(f"{url}/generate", json=body | {"stream": stream}).__aenter__()
                )
                await until(lambda: engine.in_flight)
                if stream:
                    await call  # the headers of a stream come at once
                else:
                    call.cancel()
            await until(lambda: not engine.in_flight)


async def test_a_full_queue_is_a_busy_engine(dense: Path) -> None:
    async with serving(dense, max_running_requests=1, max_queued_requests=1) as (client, engine, _):
        engine.paused = True
        call = asyncio.create_task(client.generate(request("a"), timeout_s=T))
        await until(lambda: engine.in_flight)
        with pytest.raises(EngineBusy, match="queue is full"):
            await client.generate(request("b"), timeout_s=T)
        engine.resume()
        await client.resume(timeout_s=T)
        await call


async def test_one_bad_prompt_of_a_batch_refuses_the_batch(dense: Path) -> None:
    async with serving(dense) as (_, engine, url), aiohttp.ClientSession() as session:
        body = {"input_ids": [[1], [999]], "sampling_params": {"max_new_tokens": 200}}
        async with session.post(f"{url}/generate", json=body) as reply:
            assert reply.status == 400
            assert "found 999" in (await reply.json())["error"]["message"]
        assert engine.in_flight == 0


async def test_a_rid_in_use_is_refused(dense: Path) -> None:
    async with serving(dense) as (client, engine, _):
        engine.paused = True
        call = asyncio.create_task(client.generate(request("same"), timeout_s=T))
        await until(lambda: engine.in_flight)
        with pytest.raises(InvalidRequest, match="in flight already"):
            await client.generate(request("same"), timeout_s=T)
        await client.resume(timeout_s=T)
        await call
        await client.generate(request("same"), timeout_s=T)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/generate", "{", "not JSON"),
        ("/generate", "[]", "must be a JSON object"),
        ("/generate", '{"input_ids": [1], "stream": true, "sampling_params": {"n": 2}}', "stream"),
        ("/generate", '{"input_ids": [1, 999], "stream": true}', "found 1 to 999"),
        ("/abort_request", "{}", "rid"),
        ("/pause_generation", '{"mode": "nap"}', "mode must be one of"),
        ("/update_weight_version", "{}", "new_version"),
        ("/update_weights_from_disk", "{}", "model_path is missing"),
        ("/update_weights_from_disk", '{"model_path": 3}', "model_path must be of type str"),
        ("/weights_checker", "{}", "action"),
    ],
)
async def test_malformed_calls_get_400_and_the_reason(
    dense: Path, path: str, body: str, words: str
) -> None:
    async with (
        serving(dense) as (_, _, url),
        aiohttp.ClientSession() as session,
        session.post(url + path, data=body) as reply,
    ):
        assert reply.status == 400
        assert words in await reply.text()


async def test_starting_without_a_model_or_on_a_taken_port_says_what_to_do(
    dense: Path, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=r"cannot read .*config\.json"):
        await serve_engine(CpuEngineConfig(model=tmp_path))
    with pytest.raises(StartupError, match="Lower the former or raise it"):
        await serve_engine(CpuEngineConfig(model=dense, kv_cache_max_bytes=1000))
    taken = listen("127.0.0.1", 0)
    config = CpuEngineConfig(model=dense, port=taken.getsockname()[1])
    for settings in (config, config.model_copy(update={"dtype": "float64"})):
        with pytest.raises(StartupError, match=r"is in use; choose another port"):
            await serve_engine(settings)
    taken.close()


async def test_the_process_drains_on_sigterm(dense: Path) -> None:
    free = listen("127.0.0.1", 0)
    port = free.getsockname()[1]
    free.close()
    program = (
        "import asyncio; from rollout_engine.engines.cpu.config import CpuEngineConfig; "
        "from rollout_engine.engines.cpu.main import serve_engine; "
        f"asyncio.run(serve_engine(CpuEngineConfig(model={str(dense)!r}, port={port})))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/health") as reply:
                    assert reply.status == 200
                    break
            except aiohttp.ClientError:
                assert process.returncode is None
                await asyncio.sleep(0.05)
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 250, "ignore_eos": True}}
        call = asyncio.create_task(session.post(f"{url}/generate", json=body).__aenter__())
        running = 0
        while not running and not call.done():
            async with session.get(f"{url}/v1/loads") as reply:
                running = (await reply.json())["loads"][0]["num_running_reqs"]
        process.send_signal(signal.SIGTERM)
        reply = await call
        assert len(json.loads(await reply.read())["output_ids"]) == 250
    assert await process.wait() == 0
