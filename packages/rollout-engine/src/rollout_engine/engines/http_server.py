"""Running an HTTP application: on a port of its own choosing in tests, as a process otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any

import uvicorn
from service_kit.errors import StartupError
from starlette.types import ASGIApp


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would raise them again at the end, and exit with an error."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket.

    Raises:
        StartupError: the port is taken or the address is not this machine's.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        what = "is in use" if error.errno == errno.EADDRINUSE else f"failed: {error.strerror}"
        raise StartupError(
            f"listening on {host}:{port} {what}; choose another port or stop whoever uses it"
        ) from error
    return sock


def url_of(sock: socket.socket) -> str:
    """Return the base URL of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.asynccontextmanager
async def running(
    app: ASGIApp,
    sock: socket.socket,
    *,
    background: Sequence[Coroutine[Any, Any, None]] = (),
    grace_s: float = 0.0,
) -> AsyncIterator[asyncio.Event]:
    """Serve an application for the body of the `async with`.

    Args:
        app: The application.
        sock: From `listen`; closed at the end.
        background: Run beside it; if one ends with an error, so does the body.
        grace_s: How long requests in flight may go on at the end, seconds; at least 1.

    Yields:
        An event that is set when the server stops by itself.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(grace_s)),
    )
    server = _Server(config)
    stopped = asyncio.Event()

    async def serve() -> None:
        try:
            await server.serve(sockets=[sock])
        finally:
            stopped.set()

    try:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(serve())
            others = [group.create_task(work) for work in background]
            try:
                yield stopped
            finally:
                server.should_exit = True
                await asyncio.shield(serving)
                for task in others:
                    task.cancel()
    except BaseExceptionGroup as group:
        # The body's own error, as if there were no tasks beside it.
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from None
        raise
    finally:
        sock.close()


async def until_signal(stopped: asyncio.Event) -> None:
    """Wait for SIGTERM or SIGINT, or for `stopped`."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    try:
        await stopped.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


__all__ = ["listen", "running", "until_signal", "url_of"]
