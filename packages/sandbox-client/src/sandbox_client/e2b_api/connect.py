"""Connect calls with JSON over HTTP/1.1: their messages in and out."""

import json
from collections.abc import AsyncGenerator
from typing import TypeVar

import pydantic
from starlette.requests import Request
from starlette.responses import Response

from sandbox_client.e2b_api.config import E2BApiConfig
from sandbox_client.e2b_api.errors import EnvdError
from sandbox_client.e2b_api.framing import (
    Envelope,
    EnvelopeReader,
    FramingError,
    end_of_stream,
    wrap,
)
from sandbox_client.e2b_api.http import body_chunks, read_body
from sandbox_client.e2b_api.messages import envd_message

__all__ = [
    "STREAM_TYPE",
    "envelopes",
    "frame",
    "stream_failure",
    "stream_message",
    "unary_message",
]

STREAM_TYPE = "application/connect+json"
_M = TypeVar("_M", bound=pydantic.BaseModel)


def frame(message: object) -> bytes:
    """One message of a response's stream."""
    return wrap(json.dumps(message, separators=(",", ":")).encode())


def stream_failure(error: EnvdError) -> Response:
    """The response of a streaming call that failed: its status is 200 all the same."""
    return Response(end_of_stream(error.body), media_type=STREAM_TYPE)


async def envelopes(request: Request, settings: E2BApiConfig) -> AsyncGenerator[Envelope, None]:
    """The messages that a client streams, as they come.

    A stream has no end of its own in time: whoever opens one keeps it alive by messages.

    Raises:
        EnvdError: the bytes are no envelopes.
    """
    reader = EnvelopeReader(settings.message_bytes)
    try:
        async for chunk in body_chunks(request, settings.upload_bytes, settings.idle_timeout_s):
            for envelope in reader.feed(chunk):
                yield envelope
        reader.finish()
    except FramingError as error:
        raise EnvdError("invalid_argument", str(error)) from None


async def stream_message(kind: type[_M], request: Request, settings: E2BApiConfig) -> _M:
    """The one message of a call that streams its response only."""
    found = [envelope async for envelope in envelopes(request, settings)]
    if len(found) != 1:
        raise EnvdError("invalid_argument", f"expected one message, found {len(found)}")
    return envd_message(kind, found[0].data)


async def unary_message(kind: type[_M], request: Request, settings: E2BApiConfig) -> _M:
    """The message of a call that streams nothing."""
    data = await read_body(request, settings.message_bytes, settings.idle_timeout_s)
    return envd_message(kind, data)
