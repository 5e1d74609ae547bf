"""From an engine's reply to the agent loop's, and from its errors to the house's."""

from __future__ import annotations

import itertools
from typing import Literal

import numpy as np
from service_kit.errors import Reason, ServiceError, service_error

from rollout_engine.engines.errors import (
    EngineBusy,
    EngineError,
    EngineTimeout,
    InvalidRequest,
)
from rollout_engine.engines.types import FinishKind, Generation, LabelSpan
from rollout_engine.policy import FinishReason, GenerateRequest, GenerateResult
from rollout_engine.types import VersionSpan

UNKNOWN_VERSION = 0


def version_number(label: str) -> int:
    """Return the number that a label stands for; 0 for labels that are no numbers."""
    return int(label) if label.isascii() and label.isdigit() else UNKNOWN_VERSION


def result_of(
    request: GenerateRequest, done: Generation, kv_policy: Literal["recompute", "keep"]
) -> GenerateResult:
    """Turn a finished generation into a turn's result."""
    finish = done.finish
    stopped = finish is not None and finish.kind is FinishKind.STOP
    # SGLang calls it length when the last token allowed is a stop token; the turn is complete.
    if done.output_ids and done.output_ids[-1] in request.stop_token_ids:
        stopped = True
    return GenerateResult(
        output_ids=np.array(done.output_ids, np.int32),
        logprobs=np.array(done.logprobs, np.float32),
        finish=FinishReason.STOP if stopped else FinishReason.LENGTH,
        versions=_spans(done, kv_policy),
        cached_tokens=done.cached_tokens,
    )


def _spans(done: Generation, kv_policy: str) -> tuple[VersionSpan, ...]:
    count = len(done.output_ids)
    made = done.version_spans or (LabelSpan(done.weight_version, 0, count),)
    oldest = done.kv_spans if done.kv_spans is not None else _deduced(done, made, kv_policy)
    edges = sorted({edge for span in (*made, *oldest) for edge in (span.start, span.end)})
    return tuple(
        VersionSpan(start, end, _at(made, start), _at(oldest, start))
        for start, end in itertools.pairwise(edges)
    )


def _at(spans: tuple[LabelSpan, ...], position: int) -> int:
    for span in spans:
        if span.start <= position < span.end:
            return version_number(span.version)
    return UNKNOWN_VERSION


def _deduced(
    done: Generation, made: tuple[LabelSpan, ...], kv_policy: str
) -> tuple[LabelSpan, ...]:
    """Say what is known of the KV cache of an engine that doesn't report it."""
    if kv_policy == "recompute":
        return made
    if done.cached_tokens > 0:
        return ()
    if done.retractions >= len(made) - 1:
        return made
    return (LabelSpan(made[0].version, 0, len(done.output_ids)),)


def service_error_of(error: EngineError) -> ServiceError:
    """Translate an engine's error for callers outside this package."""
    reason = Reason.INTERNAL
    if isinstance(error, InvalidRequest):
        reason = Reason.INVALID_ARGUMENT
    elif isinstance(error, EngineTimeout):
        reason = Reason.DEADLINE_EXCEEDED
    elif isinstance(error, EngineBusy):
        reason = Reason.QUOTA_EXHAUSTED
    elif error.retryable:
        reason = Reason.UNAVAILABLE
    return service_error(reason, str(error), retryable=error.retryable)


__all__ = ["UNKNOWN_VERSION", "result_of", "service_error_of", "version_number"]
