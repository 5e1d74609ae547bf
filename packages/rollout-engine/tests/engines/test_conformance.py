"""What the client relies on of SGLang's HTTP API, against every engine that claims to speak it.

The embedded engine is always tested. Under the marker `sglang` the same suite runs against a real
server: set TAILRACE_SGLANG_URL to its base URL and TAILRACE_SGLANG_MODELS to two checkpoint folders
of the served architecture, separated by a colon; the server must have been started with the first.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from rollout_engine.engines.api import engine_app
from rollout_engine.engines.cpu.backend import CpuBackend
from rollout_engine.engines.cpu.config import CpuEngineConfig
from rollout_engine.engines.cpu.engine import CpuEngine
from rollout_engine.engines.cpu.spec import read_spec
from rollout_engine.engines.cpu.weights import load_weights
from rollout_engine.engines.errors import (
    EngineError,
    GenerationAborted,
    InvalidRequest,
    WeightUpdateFailed,
)
from rollout_engine.engines.http_server import listen, running, url_of
from rollout_engine.engines.sglang import SglangClient
from rollout_engine.engines.types import EngineRequest, FinishKind, PauseMode, SamplingParams

PROMPT = [10, 20, 30, 40, 50]
T = 60.0


@dataclass
class Target:
    url: str
    models: tuple[str, str]
    client: SglangClient
    session: aiohttp.ClientSession
    embedded: bool

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body) as reply:
            text = await reply.text()
            return reply.status, json.loads(text) if text[:1] in ("[", "{") else text

    async def until_busy(self) -> None:
        """Wait until a request has its prompt in the cache."""
        async with asyncio.timeout(T):
            while not (await self.client.load(timeout_s=T)).used_tokens:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    def company(self) -> list[asyncio.Task[Any]]:
        """Long requests beside the one under test, which alone could end before it is reached."""
        return [
            asyncio.create_task(
                self.generate(rid=f"other-{number}", sampling_params={"max_new_tokens": 240})
            )
            for number in range(63)
        ]

    async def generate(self, **changes: Any) -> Any:
        sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
        sampling |= changes.pop("sampling_params", {})
        body = {"input_ids": PROMPT, "return_logprob": True, "sampling_params": sampling} | changes
        status, reply = await self.post("/generate", body)
        assert status == 200, reply
        return reply


def embedded_engine(model: Path) -> CpuBackend:
    config = CpuEngineConfig(model=model, context_tokens=256)
    weights = load_weights(model, read_spec(model))
    return CpuBackend(CpuEngine(config, weights, time.monotonic), model)


@pytest.fixture(params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
async def target(request: pytest.FixtureRequest) -> AsyncIterator[Target]:
    async with aiohttp.ClientSession() as session:
        if request.param == "sglang":
            url, models = (os.environ.get(f"TAILRACE_SGLANG_{x}") for x in ("URL", "MODELS"))
            if not url or not models:
                pytest.skip("set TAILRACE_SGLANG_URL and TAILRACE_SGLANG_MODELS")
            first, second = models.split(":")
            async with SglangClient(url) as client:
                yield Target(url, (first, second), client, session, embedded=False)
                await client.resume(timeout_s=T)
                await client.update_weights_from_disk(first, "default", timeout_s=T)
            return
        dense: Path = request.getfixturevalue("dense")
        dense_b: Path = request.getfixturevalue("dense_b")
        backend = embedded_engine(dense)
        sock = listen("127.0.0.1", 0)
        url = url_of(sock)
        async with (
            running(engine_app(backend), sock, background=[backend.run()]),
            SglangClient(url) as client,
        ):
            yield Target(url, (str(dense), str(dense_b)), client, session, embedded=True)


async def test_a_reply_has_tokens_logprobs_and_versions(target: Target) -> None:
    reply = await target.generate(rid="req-1", logprob_start_len=0, top_logprobs_num=2)
    assert isinstance(reply["text"], str)
    output, meta = reply["output_ids"], reply["meta_info"]
    assert len(output) == 6
    assert meta["id"] == "req-1"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 6)
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 6}]
    assert meta["num_retractions"] == 0
    assert [row[1:] for row in meta["output_token_logprobs"]] == [[t, None] for t in output]
    assert meta["output_token_logprobs_length"] == 6
    assert [row[1] for row in meta["input_token_logprobs"]] == PROMPT
    assert meta["input_token_logprobs"][0][0] is None
    assert all(row[0] < 0 for row in meta["input_token_logprobs"][1:])
    assert meta["input_top_logprobs"][0] is None
    assert [len(row) for row in meta["output_top_logprobs"]] == [2] * 6
    # Greedy: the sampled token is the first of the top ones.
    assert [row[0][1] for row in meta["output_top_logprobs"]] == output


async def test_prompt_logprobs_start_where_they_are_asked_to(target: Target) -> None:
    whole = (await target.generate(logprob_start_len=0))["meta_info"]["input_token_logprobs"]
    part = (await target.generate(logprob_start_len=2))["meta_info"]["input_token_logprobs"]
    assert [row[1] for row in part] == PROMPT[2:]
    assert part[0][0] is None
    assert [row[0] for row in part[1:]] == pytest.approx([row[0] for row in whole[3:]], abs=1e-2)
    assert (await target.generate())["meta_info"]["input_token_logprobs"] == []


async def test_without_logprobs_their_fields_are_absent(target: Target) -> None:
    meta = (await target.generate(return_logprob=False))["meta_info"]
    assert not [key for key in meta if "token_logprobs" in key]


async def test_the_second_call_finds_the_prefix(target: Target) -> None:
    await target.generate()
    meta = (await target.generate())["meta_info"]
    assert meta["cached_tokens"] == 4
    assert meta["cached_tokens_details"] == {"device": 4, "host": 0}


async def test_a_stop_token_is_matched_and_kept(target: Target) -> None:
    free = (await target.generate())["output_ids"]
    stop = free[3]
    # SGLang ignores stop tokens, too, where it ignores the end of the sequence.
    sampling = {"stop_token_ids": [stop], "max_new_tokens": 60, "ignore_eos": False}
    reply = await target.generate(sampling_params=sampling)
    first = free.index(stop)
    assert reply["output_ids"] == free[: first + 1]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert reply["meta_info"]["output_token_logprobs_length"] == first + 1


async def test_many_prompts_or_samples_are_answered_by_a_list(target: Target) -> None:
    replies = await target.generate(input_ids=[PROMPT, PROMPT[:3]])
    assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == [5, 3]
    replies = await target.generate(sampling_params={"n": 3, "temperature": 1.0})
    assert [len(reply["output_ids"]) for reply in replies] == [6, 6, 6]


async def test_a_stream_is_cumulative_and_ends_with_the_versions(target: Target) -> None:
    sampling = {"max_new_tokens": 64, "temperature": 0, "ignore_eos": True}
    body = {
        "input_ids": PROMPT,
        "return_logprob": True,
        "stream": True,
        "sampling_params": sampling,
    }
    async with target.session.post(target.url + "/generate", json=body) as reply:
        assert reply.status == 200
        assert reply.content_type == "text/event-stream"
        events = [line[6:] for line in (await reply.text()).split("\n\n") if line]
    assert events[-1].strip() == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    whole = (await target.generate(sampling_params=sampling))["output_ids"]
    counts = [len(chunk["output_ids"]) for chunk in chunks]
    # A server that falls behind joins tokens, so how many chunks there are is left to it.
    assert len(counts) > 1
    assert counts == sorted(set(counts))
    for chunk, count in zip(chunks, counts, strict=True):
        assert chunk["output_ids"] == whole[:count]
        assert len(chunk["meta_info"]["output_token_logprobs"]) == count
    assert chunks[-1]["output_ids"] == whole
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 64}
    assert chunks[-1]["meta_info"]["weight_versions"]
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])


async def test_an_aborted_request_is_answered_with_what_it_has(target: Target) -> None:
    for body in ({"rid": "ab1"}, {"rid": "", "abort_all": True}):
        call = asyncio.create_task(
            target.generate(rid="ab1", sampling_params={"max_new_tokens": 240})
        )
        others = target.company()
        await target.until_busy()
        status, reply = await target.post("/abort_request", body)
        assert (status, reply) == (200, "")
        meta = (await call)["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert meta["completion_tokens"] < 240
        await asyncio.gather(*others)


async def test_requests_that_can_not_be_served_get_400_and_a_message(target: Target) -> None:
    info = await target.client.server_info(timeout_s=T)
    too_long = [1] * (info["max_req_input_len"] + 10)
    status, reply = await target.post("/generate", {"input_ids": too_long})
    assert status == 400
    assert "longer than the model's context length" in reply["error"]["message"]
    status, reply = await target.post("/generate", {"sampling_params": {}})
    assert status == 400
    assert "input_ids" in reply["error"]["message"]
    with pytest.raises(InvalidRequest, match="longer than"):
        await target.client.generate(EngineRequest(rid="x", input_ids=too_long), timeout_s=T)


async def test_an_unknown_path_gets_404(target: Target) -> None:
    async with target.session.get(target.url + "/get_load") as reply:
        assert (reply.status, await reply.json()) == (404, {"detail": "Not Found"})


async def test_health_is_an_empty_200(target: Target) -> None:
    for path in ("/health", "/health_generate"):
        async with target.session.get(target.url + path) as reply:
            assert (reply.status, await reply.read()) == (200, b"")
    await target.client.check_health(timeout_s=T)


async def test_status_calls_are_understood_by_the_client(target: Target) -> None:
    info = await target.client.model_info(timeout_s=T)
    assert info.architectures == ("Qwen3ForCausalLM",)
    assert info.model_type == "qwen3"
    assert Path(info.served_name) == Path(target.models[0])
    load = await target.client.load(timeout_s=T)
    assert (load.running, load.waiting) == (0, 0)
    assert load.max_tokens > 0
    async with target.session.get(target.url + "/v1/models") as reply:
        models = (await reply.json())["data"]
    assert models[0]["max_model_len"] > 0
    status, _ = await target.post("/get_model_info", {})
    assert status in (200, 405)


async def test_an_update_from_disk_changes_weights_label_and_path(target: Target) -> None:
    before = await target.generate()
    count = await target.client.update_weights_from_disk(target.models[1], "7", timeout_s=T)
    assert count == 0
    after = await target.generate()
    assert after["output_ids"] != before["output_ids"]
    assert after["meta_info"]["weight_version"] == "7"
    assert after["meta_info"]["cached_tokens"] == 0
    info = await target.client.model_info(timeout_s=T)
    assert (info.weight_version, info.model_path) == ("7", target.models[1])
    # SGLang's name, where it is the folder's, follows the folder; ours stays.
    assert Path(info.served_name) == Path(target.models[0 if target.embedded else 1])


async def test_an_update_from_a_bad_path_changes_nothing(target: Target) -> None:
    before = await target.client.weights_checksum(timeout_s=T)
    with pytest.raises(WeightUpdateFailed):
        await target.client.update_weights_from_disk("/nowhere", "8", timeout_s=T)
    status, reply = await target.post("/update_weights_from_disk", {"model_path": "/nowhere"})
    assert status == 400
    assert reply["success"] is False
    assert reply["num_paused_requests"] == 0
    assert (await target.client.weights_checksum(timeout_s=T)) == before
    assert (await target.client.model_info(timeout_s=T)).weight_version != "8"


async def test_a_label_alone_can_be_changed(target: Target) -> None:
    status, reply = await target.post(
        "/update_weight_version", {"new_version": "v3", "abort_all_requests": False}
    )
    assert status == 200
    assert reply["success"]
    assert reply["new_version"] == "v3"
    assert (await target.generate())["meta_info"]["weight_version"] == "v3"


async def test_a_flush_empties_the_prefix_cache(target: Target) -> None:
    await target.generate()
    assert await target.client.flush_cache(timeout_s=T)
    assert (await target.generate())["meta_info"]["cached_tokens"] == 0


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_paused_requests_go_on_with_the_new_weights(target: Target, mode: PauseMode) -> None:
    call = asyncio.create_task(target.generate(rid="long", sampling_params={"max_new_tokens": 200}))
    others = target.company()
    await target.until_busy()
    await target.client.pause(mode, timeout_s=T)
    paused = await target.client.update_weights_from_disk(
        target.models[1], "9", timeout_s=T, flush_cache=False
    )
    assert paused >= 1 or not target.embedded
    assert not call.done()
    await target.client.resume(timeout_s=T)
    meta = (await call)["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 200}
    spans = meta["weight_versions"]
    assert [span["version"] for span in spans] == ["default", "9"]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], 200)
    if mode is PauseMode.RETRACT:
        assert meta["num_retractions"] >= 1
    await asyncio.gather(*others)


async def test_a_pause_ends_requests_by_default_and_holds_new_ones(target: Target) -> None:
    request = EngineRequest(
        rid="p", input_ids=PROMPT, sampling=SamplingParams(max_new_tokens=200, ignore_eos=True)
    )
    call = asyncio.create_task(target.client.generate(request, timeout_s=T))
    others = target.company()
    await target.until_busy()
    status, reply = await target.post("/pause_generation", {})
    assert (status, reply["status"]) == (200, "ok")
    with pytest.raises(GenerationAborted, match="aborted after"):
        await call
    await asyncio.gather(*others)
    later = asyncio.create_task(target.generate())
    await asyncio.sleep(0.05)
    assert not later.done()
    await target.client.resume(timeout_s=T)
    assert len((await later)["output_ids"]) == 6


async def test_checksums_tell_two_checkpoints_apart(target: Target) -> None:
    first = await target.client.weights_checksum(timeout_s=T)
    await target.client.update_weights_from_disk(target.models[1], "2", timeout_s=T)
    second = await target.client.weights_checksum(timeout_s=T)
    assert second.root_hash != first.root_hash
    assert second.tensors.keys() == first.tensors.keys()
    await target.client.update_weights_from_disk(target.models[0], "3", timeout_s=T)
    assert await target.client.weights_checksum(timeout_s=T) == first


async def test_the_client_reads_its_own_kind_of_reply(target: Target) -> None:
    request = EngineRequest(
        rid="c", input_ids=PROMPT, sampling=SamplingParams(max_new_tokens=4, ignore_eos=True)
    )
    done = await target.client.generate(request, timeout_s=T)
    assert done.rid == "c"
    assert len(done.output_ids) == len(done.logprobs) == 4
    assert done.finish is not None
    assert done.finish.kind is FinishKind.LENGTH
    assert done.version_spans[-1].end == 4
    assert done.kv_spans == (done.version_spans if target.embedded else None)
    with pytest.raises(EngineError):
        await target.client.generate(
            EngineRequest(rid="d", input_ids=[], sampling=SamplingParams()), timeout_s=T
        )
