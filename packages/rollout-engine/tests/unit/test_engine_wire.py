from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_engine.engines import status_wire, wire
from rollout_engine.engines.errors import BadReply, InvalidRequest
from rollout_engine.engines.types import (
    EngineLoad,
    EngineRequest,
    Finish,
    FinishKind,
    Generation,
    LabelSpan,
    ModelInfo,
    SamplingParams,
    WeightsChecksum,
)

LOGPROBS = st.floats(-50, 0)
LABELS = st.sampled_from(["default", "1", "2"])


@st.composite
def requests(draw: st.DrawFn) -> EngineRequest:
    longest = draw(st.integers(0, 50))
    return EngineRequest(
        rid=draw(st.text(min_size=1, max_size=8)),
        input_ids=draw(st.lists(st.integers(0, 500), min_size=1, max_size=9)),
        sampling=SamplingParams(
            max_new_tokens=longest,
            temperature=draw(st.floats(0, 2)),
            top_p=draw(st.floats(0.1, 1)),
            top_k=draw(st.sampled_from([-1, 1, 20])),
            min_p=draw(st.floats(0, 1)),
            min_new_tokens=draw(st.integers(0, longest)),
            stop_token_ids=tuple(draw(st.lists(st.integers(0, 500), max_size=3))),
            ignore_eos=draw(st.booleans()),
            n=draw(st.integers(1, 3)),
            sampling_seed=draw(st.none() | st.integers(0, 2**63)),
        ),
        return_logprob=draw(st.booleans()),
        logprob_start_len=draw(st.sampled_from([-1, 0, 3])),
        top_logprobs_num=draw(st.integers(0, 3)),
        stream=draw(st.booleans()),
    )


@given(request=requests())
def test_a_request_survives_the_wire(request: EngineRequest) -> None:
    body = json.loads(json.dumps(wire.request_to_json(request)))
    assert wire.requests_from_json(body) == ([request], request.sampling.n > 1)


@st.composite
def generations(draw: st.DrawFn) -> Generation:
    output = tuple(draw(st.lists(st.integers(0, 500), min_size=1, max_size=6)))
    count = len(output)
    cut = draw(st.integers(0, count))
    pieces = [(0, cut), (cut, count)]
    spans = tuple(LabelSpan(draw(LABELS), a, b) for a, b in pieces if a < b)
    finish = draw(
        st.sampled_from(
            [
                Finish(FinishKind.STOP, matched=output[-1]),
                Finish(FinishKind.LENGTH),
                Finish(FinishKind.ABORT, message="Aborted"),
            ]
        )
    )
    pairs = st.tuples(LOGPROBS, st.integers(0, 500))
    tops = st.lists(pairs, min_size=2, max_size=2).map(tuple)
    return Generation(
        rid="r",
        output_ids=output,
        finish=finish,
        prompt_tokens=draw(st.integers(1, 99)),
        weight_version=draw(LABELS),
        logprobs=tuple(draw(st.lists(LOGPROBS, min_size=count, max_size=count))),
        prompt_logprobs=((None, 5), *draw(st.lists(pairs, max_size=3))),
        top_logprobs=tuple(draw(st.lists(tops, min_size=count, max_size=count))),
        prompt_top_logprobs=(None, *draw(st.lists(tops, max_size=2))),
        version_spans=spans,
        kv_spans=draw(st.sampled_from([None, spans])),
        cached_tokens=draw(st.integers(0, 9)),
        retractions=draw(st.integers(0, 2)),
        engine_s=draw(st.floats(0, 99)),
    )


@given(done=generations())
def test_a_reply_survives_the_wire(done: Generation) -> None:
    request = EngineRequest(rid="r", input_ids=[1], top_logprobs_num=2)
    body = json.loads(json.dumps(wire.generation_to_json(request, done)))
    assert wire.generation_from_json(body, "e") == done


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "Either text, input_ids or input_embeds should be provided."),
        ({"text": "hi"}, "no tokenizer"),
        ({"input_ids": "12"}, "list of integers"),
        ({"input_ids": [1, "a"]}, "list of integers"),
        ({"input_ids": [1, True]}, "list of integers"),
        ({"input_ids": [1], "lora_path": "x"}, "lora_path"),
        ({"input_ids": [1], "rid": 7}, "rid must be of type str"),
        ({"input_ids": [1], "return_logprob": 1}, "return_logprob must be of type bool"),
        ({"input_ids": [1], "logprob_start_len": True}, "logprob_start_len must be of type int"),
        ({"input_ids": [1], "logprob_start_len": -2}, "at least -1"),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid must have 2 entries"),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "unique"),
        ({"input_ids": [1], "sampling_params": {"stop": ["x"]}}, "sampling_params.stop"),
        ({"input_ids": [1], "sampling_params": {"frequency_penalty": 0.5}}, "frequency_penalty"),
        ({"input_ids": [1], "sampling_params": {"repetition_penalty": 1.5}}, "repetition_penalty"),
        ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p must be in (0, 1]"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"min_new_tokens": 200}}, "min_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": ["x"]}}, "stop_token_ids"),
        ({"input_ids": [1], "sampling_params": {"n": 0}}, "n must be at least 1"),
    ],
)
def test_what_is_not_served_is_refused_by_name(body: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words.replace("(", r"\(").replace("[", r"\[")):
        wire.requests_from_json(body)


def test_options_that_are_off_are_no_obstacle() -> None:
    body: dict[str, Any] = {
        "input_ids": [1],
        "lora_path": None,
        "return_hidden_states": False,
        "sampling_params": {
            "stop": None,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "skip_special_tokens": True,
            "top_k": 0,
            "stop_token_ids": 7,
        },
    }
    (request,), as_list = wire.requests_from_json(body)
    assert not as_list
    assert request.sampling == SamplingParams(stop_token_ids=(7,))


def test_options_of_a_batch_are_one_for_all_or_one_each() -> None:
    body = {
        "input_ids": [[1], [2, 3]],
        "rid": "r",
        "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        "logprob_start_len": [0, -1],
        "top_logprobs_num": 4,
    }
    made, as_list = wire.requests_from_json(body)
    assert as_list
    assert [r.rid for r in made] == ["r_0", "r_1"]
    assert [r.sampling.max_new_tokens for r in made] == [1, 2]
    assert [r.logprob_start_len for r in made] == [0, -1]
    assert [r.top_logprobs_num for r in made] == [4, 4]


META = {"id": "r", "finish_reason": {"type": "length", "length": 2}, "prompt_tokens": 3}
META |= {"weight_version": "default", "completion_tokens": 2}


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"output_token_logprobs": [[-1.0, 5, None]]}, "2 tokens came with 1 log-prob"),
        ({"weight_versions": [{"version": "1", "start": 0, "end": 1}]}, "weight_versions must"),
        ({"kv_versions": [{"version": "1", "start": 1, "end": 2}]}, "kv_versions must cover"),
        ({"finish_reason": {"type": "tired"}}, "tired"),
        ({"prompt_tokens": None}, "expected output_ids and meta_info"),
    ],
)
def test_a_reply_that_contradicts_itself_is_a_bad_reply(meta: dict[str, Any], words: str) -> None:
    with pytest.raises(BadReply, match=words):
        wire.generation_from_json({"output_ids": [5, 6], "meta_info": META | meta}, "http://e")


def test_a_reply_of_another_kind_is_a_bad_reply() -> None:
    bodies: list[Any] = [[], {}, {"output_ids": [1]}, {"output_ids": 3, "meta_info": META}]
    for body in bodies:
        with pytest.raises(BadReply):
            wire.generation_from_json(body, "http://e")


def test_sglangs_own_reply_is_understood() -> None:
    body = {
        "text": "\ufffd<t104>",
        "output_ids": [250, 363],
        "meta_info": {
            "id": "fl-retract",
            "finish_reason": {"type": "stop", "matched": 363},
            "prompt_tokens": 5,
            "weight_version": "w-retract",
            "num_retractions": 1,
            "input_token_logprobs": [],
            "output_token_logprobs": [[-5.7, 250, None], [-5.8, 363, None]],
            "output_token_logprobs_length": 2,
            "reasoning_tokens": 0,
            "completion_tokens": 2,
            "cached_tokens": 4,
            "weight_versions": [
                {"version": "w-in_place", "start": 0, "end": 1},
                {"version": "w-retract", "start": 1, "end": 2},
            ],
            "cached_tokens_details": {"device": 4, "host": 0},
            "dp_rank": None,
            "e2e_latency": 10.9758,
            "response_sent_to_client_ts": 1795953188.7834,
        },
    }
    assert wire.generation_from_json(body, "http://e") == Generation(
        rid="fl-retract",
        output_ids=(250, 363),
        finish=Finish(FinishKind.STOP, matched=363),
        prompt_tokens=5,
        weight_version="w-retract",
        logprobs=(-5.7, -5.8),
        version_spans=(LabelSpan("w-in_place", 0, 1), LabelSpan("w-retract", 1, 2)),
        cached_tokens=4,
        retractions=1,
        engine_s=10.9758,
    )


def test_status_replies_survive_the_wire() -> None:
    info = ModelInfo(
        model_path="/m/2",
        served_name="/m/1",
        weight_version="2",
        model_type="qwen3",
        architectures=("Qwen3ForCausalLM",),
    )
    assert status_wire.model_info_from_json(status_wire.model_info_to_json(info), "e") == info
    load = EngineLoad(
        running=3,
        waiting=2,
        used_tokens=50,
        max_tokens=100,
        max_running=8,
        tokens_per_s=12.5,
        cache_hit_rate=0.5,
        paused=1,
        tokens_generated=77,
    )
    body = status_wire.load_to_json(load, timestamp="t", timestamp_s=1.0, version="v")
    assert status_wire.load_from_json(body, "e") == load
    checksum = WeightsChecksum("ab", {"w": "cd"})
    assert status_wire.checksum_from_json(status_wire.checksum_to_json(checksum), "e") == checksum
    for read in (
        status_wire.model_info_from_json,
        status_wire.load_from_json,
        status_wire.checksum_from_json,
    ):
        with pytest.raises(BadReply, match="http://e"):
            read({"loads": [], "ranks": None}, "http://e")


def test_loads_of_data_parallel_ranks_are_summed() -> None:
    rank: dict[str, Any] = {"num_running_reqs": 2, "num_waiting_reqs": 1, "num_used_tokens": 10}
    rank |= {"max_total_num_tokens": 100, "max_running_requests": 8, "queues": {"paused": 1}}
    load = status_wire.load_from_json({"loads": [rank, rank | {"num_running_reqs": 0}]}, "e")
    assert (load.running, load.waiting, load.used_tokens, load.paused) == (2, 2, 20, 2)
