"""Bodies in and out: bounded in size and in silence."""

import asyncio
import json
from collections.abc import AsyncGenerator

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from sandbox_client.e2b_api.errors import ApiError

__all__ = ["body_chunks", "read_body", "reply"]


def reply(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Answers with JSON."""
    data = json.dumps(body, separators=(",", ":")).encode()
    return Response(data, status, headers, media_type="application/json")


async def body_chunks(request: Request, limit: int, idle_s: float) -> AsyncGenerator[bytes, None]:
    """The body as it comes.

    Raises:
        ApiError: it has over `limit` bytes, or nothing came for `idle_s`.
    """
    size = 0
    chunks = aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(idle_s):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise ApiError(408, f"no byte of the body came for {idle_s:g} s") from None
        except ClientDisconnect:
            raise ApiError(400, "the body ended early") from None
        size += len(chunk)
        if size > limit:
            raise ApiError(413, f"the body has over {limit} bytes, the most that is taken")
        yield chunk


async def read_body(request: Request, limit: int, idle_s: float) -> bytes:
    """The whole body; errors as `body_chunks`."""
    return b"".join([chunk async for chunk in body_chunks(request, limit, idle_s)])
