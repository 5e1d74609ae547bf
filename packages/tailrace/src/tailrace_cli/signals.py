"""Ctrl-C and SIGTERM as a clean end rather than an exception in some odd place."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any


async def unless_interrupted(
    work: Coroutine[Any, Any, None], on_interrupt: Callable[[], None]
) -> bool:
    """True when `work` came to its end, False when SIGINT or SIGTERM came first.

    The first signal cancels `work` and calls `on_interrupt`; later ones change nothing, so that an
    impatient second Ctrl-C does not cut the services' clean end short.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            on_interrupt()
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        await task
    except asyncio.CancelledError:
        if not interrupted:
            raise
        return False
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return True
