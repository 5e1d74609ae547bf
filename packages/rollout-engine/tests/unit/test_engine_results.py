from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from rollout_engine.engines.errors import (
    BadReply,
    EngineBusy,
    EngineError,
    EnginePoisoned,
    EngineTimeout,
    EngineUnavailable,
    GenerationAborted,
    InvalidRequest,
)
from rollout_engine.engines.results import result_of, service_error_of, version_number
from rollout_engine.engines.types import Finish, FinishKind, Generation, LabelSpan
from rollout_engine.policy import FinishReason, GenerateRequest
from rollout_engine.types import Sampling, VersionSpan
from service_kit.errors import Reason

REQUEST = GenerateRequest(
    request_id="r",
    session="s",
    input_ids=np.array([1, 2], np.int32),
    max_new_tokens=4,
    sampling=Sampling(),
    seed=0,
    stop_token_ids=(9,),
    min_version=0,
    pin_version=0,
    timeout_s=1.0,
)


def generation(
    spans: tuple[LabelSpan, ...],
    kv: tuple[LabelSpan, ...] | None,
    *,
    cached: int = 0,
    retractions: int = 0,
    finish: FinishKind = FinishKind.LENGTH,
    output: tuple[int, ...] = (5, 6, 7, 8),
) -> Generation:
    return Generation(
        rid="r",
        output_ids=output,
        finish=Finish(finish),
        prompt_tokens=2,
        weight_version="2",
        logprobs=(-1.0,) * len(output),
        version_spans=spans,
        kv_spans=kv,
        cached_tokens=cached,
        retractions=retractions,
    )


TWO = (LabelSpan("1", 0, 2), LabelSpan("2", 2, 4))


def versions(
    done: Generation, kv_policy: Literal["recompute", "keep"] = "keep"
) -> tuple[VersionSpan, ...]:
    return result_of(REQUEST, done, kv_policy).versions


def test_spans_of_versions_and_caches_are_cut_where_either_changes() -> None:
    kv = (LabelSpan("1", 0, 3), LabelSpan("2", 3, 4))
    assert versions(generation(TWO, kv)) == (
        VersionSpan(0, 2, 1, 1),
        VersionSpan(2, 3, 2, 1),
        VersionSpan(3, 4, 2, 2),
    )


def test_caches_of_an_engine_that_says_nothing_are_known_if_updates_recompute_them() -> None:
    assert versions(generation(TWO, None, cached=1), "recompute") == (
        VersionSpan(0, 2, 1, 1),
        VersionSpan(2, 4, 2, 2),
    )


def test_without_a_cached_prefix_the_oldest_version_is_that_of_the_first_token() -> None:
    assert versions(generation(TWO, None)) == (VersionSpan(0, 2, 1, 1), VersionSpan(2, 4, 2, 1))


def test_a_retraction_at_each_change_makes_the_cache_new() -> None:
    assert versions(generation(TWO, None, retractions=1)) == (
        VersionSpan(0, 2, 1, 1),
        VersionSpan(2, 4, 2, 2),
    )


def test_a_cached_prefix_of_unknown_age_is_called_unknown() -> None:
    assert versions(generation(TWO, None, cached=1)) == (
        VersionSpan(0, 2, 1, 0),
        VersionSpan(2, 4, 2, 0),
    )


def test_a_label_that_is_no_number_is_version_0() -> None:
    assert [version_number(label) for label in ("17", "default", "-3", "", "²")] == [17, 0, 0, 0, 0]


def test_arrays_have_the_agent_loops_types() -> None:
    result = result_of(REQUEST, generation(TWO, TWO), "keep")
    assert result.output_ids.dtype == np.int32
    assert result.logprobs.dtype == np.float32
    assert result.finish is FinishReason.LENGTH


def test_a_stop_token_as_the_last_one_allowed_completes_the_turn() -> None:
    done = generation((), (), output=(5, 9))
    assert result_of(REQUEST, done, "keep").finish is FinishReason.STOP


@pytest.mark.parametrize(
    ("error", "reason", "retryable"),
    [
        (InvalidRequest, Reason.INVALID_ARGUMENT, False),
        (EngineTimeout, Reason.DEADLINE_EXCEEDED, True),
        (EngineBusy, Reason.QUOTA_EXHAUSTED, True),
        (EngineUnavailable, Reason.UNAVAILABLE, True),
        (EnginePoisoned, Reason.UNAVAILABLE, True),
        (GenerationAborted, Reason.UNAVAILABLE, True),
        (BadReply, Reason.UNAVAILABLE, True),
        (EngineError, Reason.INTERNAL, False),
    ],
)
def test_engine_errors_become_the_houses(
    error: type[EngineError], reason: Reason, retryable: bool
) -> None:
    made = service_error_of(error("why", engine="http://e"))
    assert (made.reason, made.retryable) == (reason, retryable)
    assert "http://e: why" in made.message
