"""`/generate` in SGLang's JSON and as values of `engines.types`, in both directions.

Engines of ours write what `generation_to_json` gives; the client reads any engine's replies with
`generation_from_json`. One field is ours alone: `meta_info.kv_versions`, spans like
`weight_versions` with the oldest weights in the KV cache that each token attended to.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from rollout_engine.engines.errors import BadReply, InvalidRequest
from rollout_engine.engines.types import (
    EngineRequest,
    Finish,
    FinishKind,
    Generation,
    LabelSpan,
    SamplingParams,
    TopLogprobs,
)

Json = dict[str, Any]

_SAMPLING_KEYS = frozenset(SamplingParams.__dataclass_fields__)
_SAMPLING_KINDS: dict[str, tuple[type, ...]] = {
    "temperature": (int, float),
    "top_p": (int, float),
    "min_p": (int, float),
    "ignore_eos": (bool,),
}
# Switches that change nothing that we return, or whose value here is the default.
_IDLE_SAMPLING = {
    "skip_special_tokens": None,
    "spaces_between_special_tokens": None,
    "no_stop_trim": None,
    "repetition_penalty": 1.0,
}
_REQUEST_KEYS = frozenset(
    {
        "rid",
        "input_ids",
        "sampling_params",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "stream",
        "log_metrics",
        "return_text_in_logprobs",
    }
)
_UNLIMITED = 1 << 30


def requests_from_json(body: Json) -> tuple[list[EngineRequest], bool]:
    """Read the body of `/generate`.

    Returns:
        The requests, and whether the reply is a list even if there is only one.

    Raises:
        InvalidRequest: a value is of a wrong kind, or an option is switched on that is not served.
    """
    for key, value in body.items():
        if key not in _REQUEST_KEYS and key != "text" and value:
            raise InvalidRequest(f"The option {key!r} is not served by this engine; leave it out.")
    ids = body.get("input_ids")
    if ids is None:
        if body.get("text"):
            raise InvalidRequest("This engine has no tokenizer: send input_ids instead of text.")
        raise InvalidRequest("Either text, input_ids or input_embeds should be provided.")
    if not isinstance(ids, list):
        raise InvalidRequest(f"input_ids must be a list of integers, found {type(ids).__name__}.")
    many = bool(ids) and isinstance(ids[0], list)
    prompts = ids if many else [ids]
    count = len(prompts)
    requests = [
        EngineRequest(
            rid=_own(body, "rid", index, count, many, str) or uuid.uuid4().hex,
            input_ids=_token_ids(prompt),
            sampling=_sampling(_own(body, "sampling_params", index, count, many, dict) or {}),
            return_logprob=bool(_own(body, "return_logprob", index, count, many, bool)),
            logprob_start_len=_start(_own(body, "logprob_start_len", index, count, many, int)),
            top_logprobs_num=_own(body, "top_logprobs_num", index, count, many, int) or 0,
            stream=bool(body.get("stream")),
        )
        for index, prompt in enumerate(prompts)
    ]
    if len({request.rid for request in requests}) < count:
        raise InvalidRequest("Each rid of a batch must be unique.")
    return requests, many or any(request.sampling.n > 1 for request in requests)


def _own(body: Json, key: str, index: int, count: int, many: bool, kind: type) -> Any:
    """Return a request's own value of an option that may be one for all or a list of one each."""
    value = body.get(key)
    if isinstance(value, list) and many:
        if len(value) != count:
            raise InvalidRequest(f"{key} must have {count} entries, found {len(value)}.")
        value = value[index]
    elif many and key == "rid" and isinstance(value, str):
        value = f"{value}_{index}"
    # bool is an int to isinstance, not to a client.
    if value is None or (isinstance(value, kind) and (kind is bool) == isinstance(value, bool)):
        return value
    raise InvalidRequest(f"{key} must be of type {kind.__name__}, found {value!r}.")


def _start(value: int | None) -> int:
    if value is None:
        return -1
    if value < -1:
        raise InvalidRequest(f"logprob_start_len must be at least -1, found {value}.")
    return value


def _token_ids(prompt: object) -> list[int]:
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise InvalidRequest("input_ids must be a list of integers.")
    return prompt


def _sampling(values: Json) -> SamplingParams:
    known: Json = {}
    for key, value in values.items():
        if key in _SAMPLING_KEYS:
            if value is not None:
                known[key] = value
        elif value and (key not in _IDLE_SAMPLING or _IDLE_SAMPLING[key] not in (None, value)):
            raise InvalidRequest(
                f"sampling_params.{key} = {value!r} is not served by this engine; leave it out."
            )
    if "max_new_tokens" in values and values["max_new_tokens"] is None:
        known["max_new_tokens"] = _UNLIMITED
    if known.get("top_k") == 0 or known.get("top_k", -1) >= _UNLIMITED:
        known["top_k"] = -1
    stops = known.pop("stop_token_ids", ())
    for key, value in known.items():
        kinds = _SAMPLING_KINDS.get(key, (int,))
        if not isinstance(value, kinds) or isinstance(value, bool) != (kinds == (bool,)):
            kind = kinds[-1].__name__
            raise InvalidRequest(f"sampling_params.{key} must be of type {kind}, found {value!r}.")
    try:
        return SamplingParams(stop_token_ids=_stops(stops), **known)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"sampling_params: {error}.") from error


def _stops(value: object) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list) and all(type(token) is int for token in value):
        return tuple(value)
    if not value:
        return ()
    raise ValueError(f"stop_token_ids must be a list of integers, found {value!r}")


def request_to_json(request: EngineRequest) -> Json:
    """Write the body of `/generate` for one prompt."""
    sampling = request.sampling
    params: Json = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
    }
    for name in ("top_p", "top_k", "min_p", "min_new_tokens", "ignore_eos", "n"):
        value = getattr(sampling, name)
        if value != SamplingParams.__dataclass_fields__[name].default:
            params[name] = value
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.sampling_seed is not None:
        params["sampling_seed"] = sampling.sampling_seed
    body: Json = {
        "rid": request.rid,
        "input_ids": request.input_ids,
        "sampling_params": params,
        "return_logprob": request.return_logprob,
    }
    if request.logprob_start_len != -1:
        body["logprob_start_len"] = request.logprob_start_len
    if request.top_logprobs_num:
        body["top_logprobs_num"] = request.top_logprobs_num
    if request.stream:
        body["stream"] = True
    return body


def generation_to_json(request: EngineRequest, done: Generation) -> Json:
    """Write a reply, or one chunk of a stream if the generation goes on."""
    meta: Json = {
        "id": done.rid,
        "finish_reason": None if done.finish is None else _finish_to_json(request, done),
        "prompt_tokens": done.prompt_tokens,
        "weight_version": done.weight_version,
        "num_retractions": done.retractions,
    }
    if request.return_logprob:
        meta["input_token_logprobs"] = _rows(done.prompt_logprobs)
        meta["output_token_logprobs"] = _rows(zip(done.logprobs, done.output_ids, strict=True))
        meta["output_token_logprobs_length"] = len(done.logprobs)
        if request.top_logprobs_num:
            meta["input_top_logprobs"] = [
                None if top is None else _rows(top) for top in done.prompt_top_logprobs
            ]
            meta["output_top_logprobs"] = [_rows(top) for top in done.top_logprobs]
    meta["reasoning_tokens"] = 0
    meta["completion_tokens"] = len(done.output_ids)
    meta["cached_tokens"] = done.cached_tokens
    if done.finish is not None:
        meta["weight_versions"] = _spans_to_json(done.version_spans)
        if done.kv_spans is not None:
            meta["kv_versions"] = _spans_to_json(done.kv_spans)
        meta["e2e_latency"] = done.engine_s
    cached = done.cached_tokens
    meta["cached_tokens_details"] = {"device": cached, "host": 0} if cached else None
    meta["dp_rank"] = None
    return {"text": "", "output_ids": done.output_ids, "meta_info": meta}


def _finish_to_json(request: EngineRequest, done: Generation) -> Json:
    finish = done.finish
    assert finish is not None
    if finish.kind is FinishKind.STOP:
        return {"type": "stop", "matched": finish.matched}
    if finish.kind is FinishKind.LENGTH:
        return {"type": "length", "length": len(done.output_ids)}
    return {
        "type": "abort",
        "message": finish.message,
        "status_code": finish.status_code,
        "err_type": None,
    }


def _spans_to_json(spans: Sequence[LabelSpan]) -> list[Json]:
    return [{"version": span.version, "start": span.start, "end": span.end} for span in spans]


def _rows(pairs: Iterable[tuple[float | None, int]]) -> list[tuple[float | None, int, None]]:
    return [(value, token, None) for value, token in pairs]


def generation_from_json(body: object, engine: str) -> Generation:
    """Read the reply to one prompt.

    Raises:
        BadReply: a field is missing or of a wrong kind, or counts disagree.
    """
    try:
        assert isinstance(body, dict)
        meta = body["meta_info"]
        output_ids = tuple(body["output_ids"])
        done = Generation(
            rid=str(meta["id"]),
            output_ids=output_ids,
            finish=_finish_from_json(meta["finish_reason"]),
            prompt_tokens=int(meta["prompt_tokens"]),
            weight_version=str(meta["weight_version"]),
            logprobs=tuple([row[0] for row in meta.get("output_token_logprobs") or ()]),
            prompt_logprobs=tuple(
                [(row[0], row[1]) for row in meta.get("input_token_logprobs") or ()]
            ),
            top_logprobs=tuple([_top(row) or () for row in meta.get("output_top_logprobs") or ()]),
            prompt_top_logprobs=tuple([_top(row) for row in meta.get("input_top_logprobs") or ()]),
            version_spans=_spans_from_json(meta.get("weight_versions") or ()),
            kv_spans=None if (kv := meta.get("kv_versions")) is None else _spans_from_json(kv),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            retractions=int(meta.get("num_retractions") or 0),
            engine_s=float(meta.get("e2e_latency") or 0.0),
        )
    except (AssertionError, KeyError, TypeError, ValueError, IndexError) as error:
        raise BadReply(
            f"/generate: expected output_ids and meta_info, found {error!r} in {str(body)[:300]}",
            engine=engine,
        ) from error
    _check_counts(done, engine)
    return done


def _check_counts(done: Generation, engine: str) -> None:
    count = len(done.output_ids)
    if done.logprobs and len(done.logprobs) != count:
        raise BadReply(
            f"/generate: {count} tokens came with {len(done.logprobs)} log-probabilities",
            engine=engine,
        )
    for name, spans in (("weight_versions", done.version_spans), ("kv_versions", done.kv_spans)):
        edges = [0, *(span.end for span in spans or ())]
        starts = [span.start for span in spans or ()]
        if spans and (starts != edges[:-1] or edges[-1] != count):
            raise BadReply(
                f"/generate: {name} must cover the {count} tokens, found {spans}", engine=engine
            )


def _finish_from_json(reason: Json | None) -> Finish | None:
    if reason is None:
        return None
    kind = FinishKind(reason["type"])
    matched = reason.get("matched")
    return Finish(
        kind,
        matched=matched if isinstance(matched, int) else None,
        message=str(reason.get("message") or ""),
        status_code=reason.get("status_code"),
    )


def _spans_from_json(spans: Sequence[Json]) -> tuple[LabelSpan, ...]:
    return tuple([LabelSpan(str(s["version"]), int(s["start"]), int(s["end"])) for s in spans])


def _top(row: Sequence[Sequence[Any]] | None) -> TopLogprobs | None:
    return None if row is None else tuple([(entry[0], entry[1]) for entry in row])


__all__ = [
    "Json",
    "generation_from_json",
    "generation_to_json",
    "request_to_json",
    "requests_from_json",
]
