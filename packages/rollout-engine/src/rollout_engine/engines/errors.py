# ruff: noqa: N818 -- named for what happened, as their siblings in service_kit.errors
"""What can go wrong at an engine, and whether asking again can help."""

from __future__ import annotations


class EngineError(Exception):
    """A call to an engine that did not succeed.

    Args:
        message: What happened, what was expected and found, and what to do next.
        engine: Base URL of the engine, or the empty string inside one.
    """

    retryable: bool = False
    """Whether the same call may succeed later or at another engine."""

    engine_at_fault: bool = False
    """Whether the engine should be dropped until it has passed a health check."""

    def __init__(self, message: str, *, engine: str = "") -> None:
        super().__init__(f"{engine}: {message}" if engine else message)
        self.message = message
        self.engine = engine


class InvalidRequest(EngineError):
    """Raised for a request that no engine with this model will ever accept (HTTP 400, 404)."""


class EngineBusy(EngineError):
    """Raised when the engine's queue is full. The engine is well: try later or elsewhere."""

    retryable = True


class EngineUnavailable(EngineError):
    """Raised when the engine can't be reached, hangs up, or answers with a server error."""

    retryable = True
    engine_at_fault = True


class EngineTimeout(EngineError):
    """Raised when a call's deadline passes. The request has been aborted at the engine."""

    retryable = True


class EnginePoisoned(EngineError):
    """Raised when a weight update failed half way: the engine must do a full load first.

    `EngineUnavailable` is the sibling for an engine that is merely gone.
    """

    retryable = True
    engine_at_fault = True


class GenerationAborted(EngineError):
    """Raised when a generation was aborted by someone else: a pause, an update, an operator.

    Another try may succeed, and the engine is well.
    """

    retryable = True


class BadReply(EngineError):
    """Raised when an engine's reply is not what the API promises: a bug or another version.

    Another engine may do better.
    """

    retryable = True
    engine_at_fault = True


class WeightUpdateFailed(EngineError):
    """Raised when new weights were refused before anything changed: the old ones still serve."""


__all__ = [
    "BadReply",
    "EngineBusy",
    "EngineError",
    "EnginePoisoned",
    "EngineTimeout",
    "EngineUnavailable",
    "GenerationAborted",
    "InvalidRequest",
    "WeightUpdateFailed",
]
