"""What the agent loop asks of the policy. `engines.fleet` fulfils it over SGLang's HTTP API."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollout_engine.types import Logprobs, Sampling, TokenIds, VersionSpan


class FinishReason(enum.StrEnum):
    """Why a generation ended. An aborted one raises instead."""

    STOP = "STOP"
    LENGTH = "LENGTH"


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """One turn of one attempt.

    Attributes:
        request_id: Unique; `abort` names it.
        session: Requests of one session go to one engine while it is healthy (prefix cache).
        input_ids: int32 [n], the whole context.
        max_new_tokens: At most so many are sampled.
        seed: For this request alone.
        stop_token_ids: Generation ends with any of these; the matched one is part of the output.
        min_version: Only an engine that holds at least this version may serve it; 0: any.
        pin_version: Only an engine that holds exactly this version may serve it; 0: any.
        timeout_s: Deadline of the whole request.
    """

    request_id: str
    session: str
    input_ids: TokenIds
    max_new_tokens: int
    sampling: Sampling
    seed: int
    stop_token_ids: tuple[int, ...]
    min_version: int
    pin_version: int
    timeout_s: float


@dataclass(frozen=True, slots=True, eq=False)
class GenerateResult:
    """What was sampled.

    Attributes:
        output_ids: int32 [m], m >= 1; ends with the stop token if `finish` is STOP.
        logprobs: float32 [m], of the sampled tokens.
        versions: Cover `[0, m)`, in order.
        cached_tokens: How much of the prompt came from the prefix cache.
    """

    output_ids: TokenIds
    logprobs: Logprobs
    finish: FinishReason
    versions: tuple[VersionSpan, ...]
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine as last seen."""

    url: str
    healthy: bool
    weight_version: str
    running: int = 0
    waiting: int = 0
    tokens_generated: int = 0


class PolicyEngine(Protocol):
    """The engines of this node as one.

    Every method raises `service_kit.errors.ServiceError`; a failed `generate` leaves nothing behind
    and may be repeated with the same tokens if the error is retryable.
    """

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one turn. Cancelling the call aborts the request at its engine."""
        ...

    async def await_version(self, *, minimum: int = 0, exactly: int = 0) -> None:
        """Return once a healthy engine holds a version that fits; 0 means no demand.

        Raises:
            ServiceError: `VERSION_NOT_READY`, not retryable: every engine has gone past `exactly`.

        """
        ...

    def end_session(self, session: str) -> None:
        """Forget where the session's requests went. Unknown sessions are fine."""
        ...

    def statuses(self) -> Sequence[EngineStatus]:
        """Every engine as last seen; does no I/O."""
        ...


__all__ = ["EngineStatus", "FinishReason", "GenerateRequest", "GenerateResult", "PolicyEngine"]
