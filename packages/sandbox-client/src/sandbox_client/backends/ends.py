"""Work that has to come to its end."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

__all__ = ["to_its_end"]

_T = TypeVar("_T")


async def to_its_end(work: Awaitable[_T]) -> _T:
    """Waits for work that must not stop half way, even if the caller goes away meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
