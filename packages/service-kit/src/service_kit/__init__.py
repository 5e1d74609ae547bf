"""Servers, channels, errors, config and telemetry shared by Tailrace's services.

A service that echoes, with health, drain, deadlines, rich errors and telemetry::

    class EchoConfig(Config):
        server: ServerConfig = ServerConfig(bind="127.0.0.1:7100")
        telemetry: TelemetryConfig = TelemetryConfig()

    async def run(config: EchoConfig) -> None:
        service = Service("demo.v1.EchoService", partial(add_EchoServiceServicer_to_server, Echo()))
        await run_until_signal(Server(config.server, [service]))

    app = service_app("echo", EchoConfig, run)
"""

from service_kit.channel import Channel, ChannelConfig, open_channel
from service_kit.cli import run_until_signal, service_app
from service_kit.config import Config, ConfigError, ConfigKey, describe_config, load_config
from service_kit.deadlines import Deadline, MissingDeadlineError, remaining_s
from service_kit.errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    OutOfRange,
    Reason,
    ResourceExhausted,
    ServiceError,
    StartupError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    error_from_rpc,
    service_error,
)
from service_kit.health import wait_until_serving
from service_kit.logs import setup_logging
from service_kit.retries import RetryConfig, idempotent_methods, retry
from service_kit.server import BusyPort, Server, ServerConfig, Service
from service_kit.streams import with_heartbeat, with_idle_deadline
from service_kit.telemetry import (
    Telemetry,
    TelemetryConfig,
    current_traceparent,
    meter,
    parent_context,
    setup_telemetry,
    span_link,
    tracer,
)

__all__ = [
    "Aborted",
    "AlreadyExists",
    "BusyPort",
    "Cancelled",
    "Channel",
    "ChannelConfig",
    "Config",
    "ConfigError",
    "ConfigKey",
    "DataLoss",
    "Deadline",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "MissingDeadlineError",
    "NotFound",
    "OutOfRange",
    "Reason",
    "ResourceExhausted",
    "RetryConfig",
    "Server",
    "ServerConfig",
    "Service",
    "ServiceError",
    "StartupError",
    "Telemetry",
    "TelemetryConfig",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "current_traceparent",
    "describe_config",
    "error_from_rpc",
    "idempotent_methods",
    "load_config",
    "meter",
    "open_channel",
    "parent_context",
    "remaining_s",
    "retry",
    "run_until_signal",
    "service_app",
    "service_error",
    "setup_logging",
    "setup_telemetry",
    "span_link",
    "tracer",
    "wait_until_serving",
    "with_heartbeat",
    "with_idle_deadline",
]
