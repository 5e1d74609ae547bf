"""Bodies in and out: bounded in size and in silence."""

import asyncio
import json
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import IO

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from sandbox_client.e2b_api.errors import ApiError

__all__ = ["SPOOL_BYTES", "body_chunks", "read_body", "reply", "spool", "spool_body"]

SPOOL_BYTES = 1 << 20
"""What an upload may take in memory; more of it goes to disk."""


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


def spool(folder: Path) -> IO[bytes]:
    """A temporary file, in memory while it is small; the caller closes it."""
    return tempfile.SpooledTemporaryFile(SPOOL_BYTES, dir=str(folder))


async def spool_body(chunks: AsyncIterator[bytes], folder: Path) -> IO[bytes]:
    """The body as a file to read from its start; the caller closes it."""
    file = spool(folder)
    try:
        async for chunk in chunks:
            file.write(chunk)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file
