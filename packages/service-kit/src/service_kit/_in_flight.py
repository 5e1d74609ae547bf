"""The calls a server is working on, so that a drain can wait for them and, in the end, cut them."""

from __future__ import annotations

import asyncio
from typing import Any


class InFlight:
    """Counts calls from their admission to the end of their handler.

    States: open -> closed (nothing is admitted any more) -> cut (what was left is cancelled).
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cut: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether new calls are refused."""
        return self._closed

    def enter(self, task: asyncio.Task[Any]) -> None:
        """Admit the call that `task` handles."""
        self._tasks.add(task)

    def leave(self, task: asyncio.Task[Any]) -> None:
        """Note that a handler has ended."""
        self._tasks.discard(task)
        self._cut.discard(task)
        self._wake()

    def was_cut(self, task: asyncio.Task[Any]) -> bool:
        """Tell whether `cut` cancelled the call, and not its client."""
        return task in self._cut

    def close(self) -> None:
        """Admit no further call."""
        self._closed = True
        self._wake()

    def cut(self) -> None:
        """Cancel what is left."""
        self._cut = set(self._tasks)
        for task in self._cut:
            task.cancel()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until a closed server has no call left; False if that takes longer."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        if self._closed and not self._tasks:
            self._idle.set()
