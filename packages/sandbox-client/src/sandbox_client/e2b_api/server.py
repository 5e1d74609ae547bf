"""Serving the endpoint beside the gRPC service, in the same process and event loop."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import uvicorn
from service_kit.addresses import split_host_port
from service_kit.auth import read_token
from service_kit.errors import StartupError
from service_kit.server import BusyPort

from sandbox_client.config import SandboxServiceConfig
from sandbox_client.core.limits import LimiterStatus
from sandbox_client.e2b_api.app import make_endpoint
from sandbox_client.manager import SandboxManager

__all__ = ["serving_e2b_api"]

logger = logging.getLogger(__name__)

_BACKLOG = 1024


class _Server(uvicorn.Server):
    """Leaves signals to the service: uvicorn would raise them again at its end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving_e2b_api(
    manager: SandboxManager, config: SandboxServiceConfig
) -> AsyncIterator[str]:
    """Serves the endpoint while the body runs; yields its URL.

    Raises:
        BusyPort: the address cannot be bound.
        StartupError: the key or a TLS file cannot be used.
    """
    settings = config.e2b_api
    endpoint = make_endpoint(manager, config, read_token(settings.api_key, settings.api_key_file))
    with _listening(settings.bind) as sock:
        try:
            server = _Server(
                uvicorn.Config(
                    endpoint.app,
                    http="h11",
                    ws="none",
                    lifespan="off",
                    log_config=None,
                    access_log=False,
                    limit_concurrency=settings.connections,
                    timeout_graceful_shutdown=1,
                    ssl_certfile=settings.tls_certificate,
                    ssl_keyfile=settings.tls_key,
                )
            )
            server.config.load()
        except OSError as error:
            raise StartupError(f"e2b_api: cannot use the TLS files: {error}") from error

        def limiters() -> list[LimiterStatus]:
            open_ones = float(len(server.server_state.connections))
            connections = LimiterStatus("e2b_api.connections", settings.connections, open_ones)
            return [connections, *endpoint.limiters()]

        manager.show(limiters)
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server.serve(sockets=[sock]))
            beside = group.create_task(endpoint.beside())
            url = _url(sock, tls=settings.tls_certificate is not None)
            if settings.address_file is not None:
                _write(settings.address_file, url + "\n")
            logger.info("serving E2B's API on %s", url)
            try:
                yield url
            finally:
                beside.cancel()
                server.should_exit = True
                await asyncio.wait({serving})
                await endpoint.close()


def _listening(bind: str) -> socket.socket:
    host, port = split_host_port(bind)
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise BusyPort(
            f"cannot listen on {bind}: {error.strerror}; stop what uses the port, or set "
            "e2b_api.bind to another address of this machine (port 0 takes a free one)"
        ) from error
    return sock


def _url(sock: socket.socket, *, tls: bool) -> str:
    host, port = sock.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _write(file: Path, text: str) -> None:
    try:
        partial = file.with_name(file.name + ".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise StartupError(
            f"e2b_api.address_file: cannot write {file}: {error.strerror}"
        ) from error
