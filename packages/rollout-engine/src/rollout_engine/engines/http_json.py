"""JSON in HTTP bodies, and errors as SGLang answers them."""

from __future__ import annotations

import json

from starlette.responses import Response

from rollout_engine.engines.errors import (
    EngineBusy,
    EngineError,
    EnginePoisoned,
    InvalidRequest,
    WeightUpdateFailed,
)
from rollout_engine.engines.wire import Json


def reply(body: object, status: int = 200) -> Response:
    """Answer with a JSON body."""
    return Response(encoded(body), status, media_type="application/json")


def encoded(body: object) -> bytes:
    """Write JSON without blanks."""
    return json.dumps(body, separators=(",", ":")).encode()


def error_reply(message: str, status: int) -> Response:
    """Answer with SGLang's form of an error."""
    return reply({"error": {"message": message}}, status)


def status_of(error: EngineError) -> int:
    """Return the HTTP status that tells a client what kind of error it is."""
    if isinstance(error, EngineBusy | EnginePoisoned):
        return 503
    return 400 if isinstance(error, InvalidRequest | WeightUpdateFailed) else 500


def parsed(data: bytes) -> Json:
    """Read the body of a call; none at all is an empty object.

    Raises:
        InvalidRequest: the body is not a JSON object.
    """
    try:
        body = json.loads(data) if data else {}
    except ValueError as error:
        raise InvalidRequest(f"The request's body is not JSON: {error}.") from error
    if not isinstance(body, dict):
        raise InvalidRequest(f"The body must be a JSON object, found {type(body).__name__}.")
    return body


__all__ = ["encoded", "error_reply", "parsed", "reply", "status_of"]
