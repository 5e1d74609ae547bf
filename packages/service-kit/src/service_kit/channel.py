"""Channels to peers: deadlines, token, TLS, retries, keepalive and errors in one place."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import pydantic
from google.protobuf import descriptor

from service_kit._client_calls import (
    CallPolicy,
    Method,
    StreamStream,
    StreamUnary,
    UnaryStream,
    UnaryUnary,
)
from service_kit._rpc_telemetry import ClientTelemetry
from service_kit.addresses import is_loopback
from service_kit.auth import bearer, channel_credentials, read_token
from service_kit.config import Config
from service_kit.health import HEALTH_SERVICE
from service_kit.retries import RetryConfig, idempotent_methods, service_config
from service_kit.server import MIB
from service_kit.telemetry import Telemetry, active_telemetry


class ChannelConfig(Config):
    """How to reach a peer."""

    target: str
    """`host:port`, `unix:/path` or a gRPC name such as `dns:///sandboxes:7101`."""

    tls: bool = False
    """Use TLS with the system's authorities. Implied by `tls_ca`."""

    tls_ca: Path | None = None
    """PEM file with the authority that signed the server's certificate."""

    tls_certificate: Path | None = None
    """PEM file with this client's certificate chain (mutual TLS)."""

    tls_key: Path | None = None
    """PEM file with the certificate's private key."""

    tls_server_name: str | None = None
    """Name to expect in the server's certificate, if it is not the target's host."""

    token: pydantic.SecretStr | None = None
    """Token to send with each call. Prefer `token_file`."""

    token_file: Path | None = None
    """File that holds the token."""

    default_timeout_s: float | None = pydantic.Field(default=None, gt=0)
    """Timeout of unary calls that pass none. Without it such a call is refused here."""

    wait_for_ready: bool = False
    """Let calls wait for a connection until their deadline, and not fail with UNAVAILABLE."""

    retry: RetryConfig = RetryConfig()
    """Retries of the methods that the contract marks as idempotent."""

    keepalive_s: float = pydantic.Field(default=30.0, ge=10)
    """Time between pings on a quiet connection; a dead peer is noticed this late."""

    keepalive_timeout_s: float = pydantic.Field(default=20.0, gt=0)
    """Time a ping may take before the connection counts as dead."""

    max_reconnect_backoff_s: float = pydantic.Field(default=2.0, gt=0)
    """Longest wait between attempts to connect."""

    max_message_bytes: int = pydantic.Field(default=4 * MIB, ge=1024)
    """Largest message received or sent."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if not self.target:
            raise ValueError("target is empty; expected host:port")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together: set both or neither")
        if self.token is not None and self.token_file is not None:
            raise ValueError("set token or token_file, not both")
        has_token = self.token is not None or self.token_file is not None
        if has_token and not self.uses_tls and not is_loopback(self.target):
            raise ValueError(
                f"a token for {self.target!r} would cross the network in the clear; set tls_ca, "
                "or tls for a certificate of a public authority"
            )
        return self

    @property
    def uses_tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.tls or self.tls_ca is not None or self.tls_certificate is not None


class Channel(grpc.aio.Channel):
    """A channel whose unary calls need a timeout and whose errors are `ServiceError`.

    Pass it to generated stubs. Use one channel for each peer and keep it.
    """

    def __init__(
        self,
        inner: grpc.aio.Channel,
        policy: CallPolicy,
        telemetry: ClientTelemetry | None = None,
    ) -> None:
        self._inner = inner
        self._policy = policy
        self._telemetry = telemetry

    def _method(self, name: str) -> Method:
        # Health checks are polled; their spans would bury the others.
        recorded = self._telemetry is not None and not name.startswith(f"/{HEALTH_SERVICE}/")
        telemetry = self._telemetry.method(name) if self._telemetry and recorded else None
        return Method(name, self._policy, telemetry)

    @property
    def target(self) -> str:
        """The peer's address, as configured."""
        return self._policy.target

    def unary_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Make the callable for a method, as generated stubs ask for it."""
        return UnaryUnary(
            self._inner.unary_unary(method, *arguments, **options), self._method(method)
        )

    def unary_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Make the callable for a method, as generated stubs ask for it."""
        return UnaryStream(
            self._inner.unary_stream(method, *arguments, **options), self._method(method)
        )

    def stream_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Make the callable for a method, as generated stubs ask for it."""
        return StreamUnary(
            self._inner.stream_unary(method, *arguments, **options), self._method(method)
        )

    def stream_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Make the callable for a method, as generated stubs ask for it."""
        return StreamStream(
            self._inner.stream_stream(method, *arguments, **options), self._method(method)
        )

    async def close(self, grace: float | None = None) -> None:
        """Close; calls in flight are cancelled after `grace` seconds, at once by default."""
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the connectivity."""
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the connectivity differs."""
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until connected."""
        await self._inner.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()


def open_channel(
    config: ChannelConfig,
    *,
    contracts: Iterable[descriptor.FileDescriptor] = (),
    idempotent: Iterable[str] = (),
    telemetry: Telemetry | None = None,
) -> Channel:
    """Open a channel. It connects with the first call.

    Args:
        config: Where to and how.
        contracts: Descriptors of the peer's `.proto` files, as `sandbox_service_pb2.DESCRIPTOR`;
            their methods with an `idempotency_level` are retried on UNAVAILABLE.
        idempotent: More methods to retry, as `package.Service/Method`.
        telemetry: Where spans and metrics go; by default where the process's own go, if anywhere.

    Raises:
        StartupError: If a TLS or token file cannot be used.
    """
    token = read_token(config.token, config.token_file)
    methods = [*idempotent_methods(*contracts), *idempotent]
    options = _options(config, service_config(methods, config.retry))
    if config.uses_tls:
        credentials = channel_credentials(config.tls_ca, config.tls_certificate, config.tls_key)
        inner = grpc.aio.secure_channel(config.target, credentials, options=options)
    else:
        inner = grpc.aio.insecure_channel(config.target, options=options)
    policy = CallPolicy(
        target=config.target,
        default_timeout_s=config.default_timeout_s,
        metadata=() if token is None else (bearer(token),),
        wait_for_ready=True if config.wait_for_ready else None,
    )
    recording = telemetry or active_telemetry()
    if recording is None or not recording.enabled:
        return Channel(inner, policy)
    return Channel(inner, policy, ClientTelemetry(recording, config.target))


def _options(config: ChannelConfig, retries: str) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = [
        ("grpc.service_config", retries),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.keepalive_time_ms", round(config.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(config.keepalive_timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", round(config.max_reconnect_backoff_s * 1000)),
        # Service configs from DNS could switch retries on for calls that are not idempotent.
        ("grpc.service_config_disable_resolution", 1),
    ]
    if is_loopback(config.target):
        # A proxy from the environment cannot reach this machine's loopback.
        options.append(("grpc.enable_http_proxy", 0))
    if config.tls_server_name is not None:
        options.append(("grpc.ssl_target_name_override", config.tls_server_name))
    return options
