"""What the engine refuses, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout_engine.engines.cpu.config import CpuEngineConfig
from rollout_engine.engines.errors import InvalidRequest
from rollout_engine.engines.types import EngineRequest


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    weight_updates: int = 0


def check_prompt(request: EngineRequest, vocab: int, context_tokens: int) -> None:
    """Refuse a prompt that can never be served.

    Raises:
        InvalidRequest: it is empty, too long or has tokens outside the vocabulary.
    """
    count = len(request.input_ids)
    if count == 0:
        raise InvalidRequest("input_ids is empty: a prompt needs at least one token.")
    if count >= context_tokens:
        raise InvalidRequest(
            f"The input ({count} tokens) is longer than the model's context length "
            f"({context_tokens} tokens)."
        )
    if min(request.input_ids) < 0 or max(request.input_ids) >= vocab:
        raise InvalidRequest(
            f"input_ids must be in [0, {vocab}), found "
            f"{min(request.input_ids)} to {max(request.input_ids)}."
        )


def check_dtype(config: CpuEngineConfig, found: torch.dtype) -> None:
    """Refuse weights that are not in the dtype that the engine computes in.

    Raises:
        ValueError: says both.
    """
    if found != getattr(torch, config.dtype):
        raise ValueError(f"dtype is {config.dtype}, but the weights were loaded in {found}")


def check_memory(config: CpuEngineConfig, context: int, token_bytes: int) -> None:
    """Refuse a configuration whose KV cache could outgrow its limit.

    Raises:
        ValueError: says what makes up the sum.
    """
    tokens = config.max_running_requests * context + config.prefix_cache_tokens
    if tokens * token_bytes > config.kv_cache_max_bytes:
        raise ValueError(
            f"the KV cache may need {tokens * token_bytes:,} bytes: {token_bytes:,} for each of "
            f"max_running_requests x context_tokens + prefix_cache_tokens = {tokens:,} tokens, but "
            f"kv_cache_max_bytes is {config.kv_cache_max_bytes:,}. Lower the former or raise it"
        )


__all__ = ["Counters", "check_dtype", "check_memory", "check_prompt"]
