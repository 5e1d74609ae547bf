"""A gRPC server that is private by default, tells its health and ends without dropping work."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import pydantic
from grpc_health.v1 import health_pb2_grpc

from service_kit._in_flight import InFlight
from service_kit._rpc_telemetry import ServerTelemetry
from service_kit._server_calls import ServiceInterceptor
from service_kit.addresses import is_loopback, is_unix, split_host_port
from service_kit.auth import read_token, server_credentials
from service_kit.config import Config
from service_kit.errors import StartupError
from service_kit.health import HEALTH_SERVICE, HealthServicer
from service_kit.telemetry import Telemetry, active_telemetry

logger = logging.getLogger(__name__)

MIB = 1024 * 1024
_LAST_WORDS_S = 1.0
"""Time for handlers that were cut off to clean up, and for last responses to leave."""


class BusyPort(StartupError):  # noqa: N818 -- named as what it is
    """The address is in use, or is not one of this machine's."""


class ServerConfig(Config):
    """Where and how a service listens."""

    bind: str = "127.0.0.1:0"
    """`host:port` or `unix:/path`. Port 0 takes a free one. An address that other machines can
    reach needs TLS and a token."""

    tls_certificate: Path | None = None
    """PEM file with the server's certificate chain."""

    tls_key: Path | None = None
    """PEM file with the certificate's private key."""

    tls_client_ca: Path | None = None
    """PEM file with the authority that must have signed the clients' certificates (mutual TLS)."""

    token: pydantic.SecretStr | None = None
    """Clients must send this token. Prefer `token_file`."""

    token_file: Path | None = None
    """File that holds the token."""

    require_deadline: bool = True
    """Refuse unary calls that come without a deadline."""

    drain_notice_s: float = pydantic.Field(default=0.0, ge=0)
    """Time between reporting NOT_SERVING and refusing calls, for balancers to notice."""

    drain_grace_s: float = pydantic.Field(default=10.0, ge=0)
    """Longest time that calls in flight may still take after the drain began."""

    max_message_bytes: int = pydantic.Field(default=4 * MIB, ge=1024)
    """Largest message received or sent."""

    max_concurrent_calls: int | None = pydantic.Field(default=None, ge=1)
    """Calls above it are refused with RESOURCE_EXHAUSTED. Streams count as long as they live."""

    address_file: Path | None = None
    """Written with the bound address once the server serves; helps with port 0."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if not is_unix(self.bind):
            split_host_port(self.bind)
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together: set both or neither")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        if self.token is not None and self.token_file is not None:
            raise ValueError("set token or token_file, not both")
        secured = self.tls_certificate and (self.token or self.token_file)
        if not is_loopback(self.bind) and not secured:
            raise ValueError(
                f"bind {self.bind!r} can be reached from other machines and needs "
                "tls_certificate, tls_key and token_file; or bind to 127.0.0.1"
            )
        return self


@dataclass(frozen=True)
class Service:
    """One gRPC service of a server."""

    name: str
    """Full name, such as `tailrace.sandbox.v1.SandboxService`; also its health entry."""

    register: Callable[[grpc.aio.Server], None]
    """Adds the servicer: `partial(add_SandboxServiceServicer_to_server, servicer)`."""

    on_drain: Callable[[], Awaitable[None]] | None = None
    """Called when the drain begins; end long-lived streams here, or they last the whole grace."""


class Server:
    """Serves the given services and `grpc.health.v1` from `start` to `drain`.

    States: new -> serving -> draining -> stopped; each is entered once.
    """

    def __init__(
        self,
        config: ServerConfig,
        services: Sequence[Service],
        telemetry: Telemetry | None = None,
    ) -> None:
        self._config = config
        self._services = tuple(services)
        self._telemetry = telemetry
        self._health: HealthServicer | None = None
        self._server: grpc.aio.Server | None = None
        self._address = ""
        self._in_flight = InFlight()
        self._drained: asyncio.Future[None] | None = None
        self.draining = asyncio.Event()
        """Set when the drain begins."""

    @property
    def address(self) -> str:
        """The bound address with its real port, as a client's target."""
        if not self._address:
            raise RuntimeError("the server has no address before start()")
        return self._address

    async def start(self) -> None:
        """Bind, and serve from now on.

        Raises:
            BusyPort: If the address cannot be bound.
            StartupError: If a TLS or token file cannot be used.
        """
        if self._server is not None:
            raise RuntimeError("start() may be called once")
        config = self._config
        token = read_token(config.token, config.token_file)
        recording = self._telemetry or active_telemetry()
        interceptor = ServiceInterceptor(
            token=token,
            require_deadline=config.require_deadline,
            open_services=[HEALTH_SERVICE],
            in_flight=self._in_flight,
            telemetry=ServerTelemetry(recording) if recording and recording.enabled else None,
        )
        self._health = HealthServicer()
        server = grpc.aio.server(
            interceptors=[interceptor],
            options=_options(config),
            maximum_concurrent_rpcs=config.max_concurrent_calls,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        for service in self._services:
            service.register(server)
        self._address = self._bind(server)
        await server.start()
        self._server = server
        for service in self._services:
            self._health.set_serving(service.name, serving=True)
        self._health.set_serving("", serving=True)
        if config.address_file is not None:
            try:
                _write_whole(config.address_file, self._address + "\n")
            except StartupError:
                await server.stop(None)
                raise
        names = ", ".join(service.name for service in self._services)
        logger.info("serving %s on %s", names, self._address)

    async def start_once(self) -> None:
        """Start unless started already."""
        if self._server is None:
            await self.start()

    def _bind(self, server: grpc.aio.Server) -> str:
        config = self._config
        _check_free(config.bind)
        try:
            if config.tls_certificate is not None and config.tls_key is not None:
                credentials = server_credentials(
                    config.tls_certificate, config.tls_key, config.tls_client_ca
                )
                port = server.add_secure_port(config.bind, credentials)
            else:
                port = server.add_insecure_port(config.bind)
        except RuntimeError as error:
            raise _cannot_listen(config.bind, str(error)) from error
        if is_unix(config.bind):
            return config.bind
        host, _, _ = config.bind.rpartition(":")
        return f"{host}:{port}"

    def set_serving(self, name: str, serving: bool) -> None:
        """Set the health of one service, or of all under the empty name."""
        if self._health is None:
            raise RuntimeError("set_serving() needs a started server")
        self._health.set_serving(name, serving=serving)

    async def drain(self) -> None:
        """Report NOT_SERVING, refuse new calls, let those in flight end, stop. Repeatable.

        New calls fail with `Unavailable` and `Reason.DRAINING`, as do those that outlive the grace.
        Cancelled, it stops at once.
        """
        if self._server is None or self._health is None:
            return
        if self._drained is not None:
            await asyncio.shield(self._drained)
            return
        self._drained = asyncio.get_running_loop().create_future()
        try:
            self.draining.set()
            self._health.drain()
            if self._config.drain_notice_s:
                await asyncio.sleep(self._config.drain_notice_s)
            # Refused here and not by gRPC, which would answer some calls with a bare CANCELLED.
            self._in_flight.close()
            async with asyncio.TaskGroup() as group:
                for service in self._services:
                    if service.on_drain is not None:
                        group.create_task(self._tell(service.name, service.on_drain))
                if not await self._in_flight.wait_idle(self._config.drain_grace_s):
                    self._in_flight.cut()
            await self._server.stop(_LAST_WORDS_S)
        except asyncio.CancelledError:
            await self._server.stop(None)
            raise
        finally:
            self._drained.set_result(None)

    async def _tell(self, name: str, on_drain: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(self._config.drain_grace_s):
                await on_drain()
        except Exception:
            # The drain itself has to go on: calls in flight depend on it.
            logger.exception("on_drain of %s failed; draining on", name)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.drain()


def _check_free(bind: str) -> None:
    """Bind for an instant: gRPC's own failure names no cause, and writes to stderr."""
    if is_unix(bind):
        return
    host, port = split_host_port(bind)
    if port == 0:
        return
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise _cannot_listen(bind, error.strerror or str(error)) from error


def _cannot_listen(bind: str, cause: str) -> BusyPort:
    return BusyPort(
        f"cannot listen on {bind}: {cause}; stop what uses the port, or set server.bind to "
        "another address of this machine (port 0 takes a free one)"
    )


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        # On by default on Linux: a second server would bind the same port and take half the calls.
        ("grpc.so_reuseport", 0),
        # Clients ping every 30 s (channel.py); the defaults would ban them.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


def _write_whole(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(file.name + ".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise StartupError(f"address_file: cannot write {file}: {error.strerror}") from error
