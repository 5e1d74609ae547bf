"""Frozen values of SGLang's API, the subset that is used here, free of JSON."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field


class PauseMode(enum.StrEnum):
    """What becomes of requests in flight when generation is paused."""

    ABORT = "abort"
    """They end at once with what they have."""
    RETRACT = "retract"
    """They go back to the queue; their KV cache is dropped and computed again."""
    IN_PLACE = "in_place"
    """They stop where they are and go on with the KV cache they have."""


class FinishKind(enum.StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a generation.

    Attributes:
        matched: The stop token, for `STOP`; it is the last of the output.
        message: Why it was aborted, for `ABORT`.
        status_code: HTTP status that an aborted request is answered with; None means 200.
    """

    kind: FinishKind
    matched: int | None = None
    message: str = ""
    status_code: int | None = None


@dataclass(frozen=True, slots=True)
class LabelSpan:
    """Output tokens `[start, end)` and the weight version, by its label, that belongs to them."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when to stop, with SGLang's defaults.

    Attributes:
        temperature: 0 is greedy.
        top_p: In (0, 1]; 1 keeps all.
        top_k: -1 keeps all.
        min_p: Drops tokens less probable than this share of the most probable one.
        min_new_tokens: Stop tokens can't be sampled before so many.
        stop_token_ids: End the generation, besides the model's own end tokens.
        ignore_eos: The model's own end tokens don't end the generation.
        n: Samples for each prompt.
        sampling_seed: Makes the tokens a function of prompt, weights and seed alone.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    sampling_seed: int | None = None

    def __post_init__(self) -> None:
        _check(self.max_new_tokens >= 0, "max_new_tokens", "at least 0", self.max_new_tokens)
        _check(self.temperature >= 0, "temperature", "at least 0", self.temperature)
        _check(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _check(self.top_k == -1 or self.top_k >= 1, "top_k", "-1 or at least 1", self.top_k)
        _check(0 <= self.min_p <= 1, "min_p", "in [0, 1]", self.min_p)
        _check(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            f"in [0, max_new_tokens = {self.max_new_tokens}]",
            self.min_new_tokens,
        )
        _check(self.n >= 1, "n", "at least 1", self.n)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken; SGLang's threshold."""
        return self.temperature < 1e-6 or self.top_k == 1

    @property
    def filtered(self) -> bool:
        """Whether some tokens are never drawn."""
        return self.top_p < 1 or self.top_k > 1 or self.min_p > 0


def _check(holds: bool, name: str, expected: str, found: object) -> None:
    if not holds:
        raise ValueError(f"{name} must be {expected}, found {found}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One prompt to continue.

    Attributes:
        rid: Unique among requests in flight; `abort` names it.
        input_ids: The prompt.
        logprob_start_len: With `return_logprob`, log-probabilities of the prompt's tokens from
            this index on are returned too; -1: none.
        top_logprobs_num: How many of the most probable tokens to report for each output token.
        stream: Report after every token.
    """

    rid: str
    input_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    return_logprob: bool = True
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    stream: bool = False


TopLogprobs = tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What came of one request, or has so far.

    Log-probabilities are `log_softmax(logits / temperature)` before top-k, top-p and min-p, at
    temperature 1 for greedy decoding: SGLang's rule.

    Attributes:
        finish: None while it goes on.
        logprobs: One for each output token; empty unless asked for.
        prompt_logprobs: From `logprob_start_len` on; the first is None, for lack of a context.
        version_spans: Cover the output; which weights sampled each token.
        kv_spans: Cover the output; the oldest weights whose KV cache each token attended to. None
            if the engine doesn't say (SGLang doesn't).
        cached_tokens: Tokens of the prompt that came from the prefix cache.
        retractions: How often its KV cache was dropped and computed again.
        engine_s: Seconds in the engine, queueing included.
    """

    rid: str
    output_ids: tuple[int, ...]
    finish: Finish | None
    prompt_tokens: int
    weight_version: str
    logprobs: tuple[float, ...] = ()
    prompt_logprobs: tuple[tuple[float | None, int], ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt_top_logprobs: tuple[TopLogprobs | None, ...] = ()
    version_spans: tuple[LabelSpan, ...] = ()
    kv_spans: tuple[LabelSpan, ...] | None = None
    cached_tokens: int = 0
    retractions: int = 0
    engine_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What an engine serves.

    Attributes:
        model_path: Where the present weights came from.
        served_name: The folder that the engine was started with, where the tokenizer is.
    """

    model_path: str
    served_name: str
    weight_version: str
    model_type: str = ""
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy an engine is."""

    running: int
    waiting: int
    used_tokens: int
    max_tokens: int
    max_running: int
    tokens_per_s: float = 0.0
    cache_hit_rate: float = 0.0
    paused: int = 0
    tokens_generated: int = 0


@dataclass(frozen=True, slots=True)
class WeightsChecksum:
    """Checksums of the weights an engine holds in memory.

    Attributes:
        root_hash: One value for all of them.
        tensors: Checksum by the tensor's name in the checkpoint.
    """

    root_hash: str
    tensors: dict[str, str]


__all__ = [
    "EngineLoad",
    "EngineRequest",
    "Finish",
    "FinishKind",
    "Generation",
    "LabelSpan",
    "ModelInfo",
    "PauseMode",
    "SamplingParams",
    "TopLogprobs",
    "WeightsChecksum",
]
