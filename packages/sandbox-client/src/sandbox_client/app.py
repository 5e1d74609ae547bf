"""Putting the service together."""

import contextlib
import os
import sys

from service_kit.cli import run_until_signal
from service_kit.errors import StartupError
from service_kit.server import Server
from service_kit.telemetry import setup_telemetry

from sandbox_client.backends.base import Backend
from sandbox_client.backends.local.backend import LocalBackend
from sandbox_client.backends.local.host import require_isolation
from sandbox_client.backends.local.users import inside_user_namespace, lacking_capabilities
from sandbox_client.config import SandboxServiceConfig
from sandbox_client.manager import SandboxManager
from sandbox_client.metrics import register_gauges
from sandbox_client.service import sandbox_service

__all__ = ["make_backend", "serve"]


def make_backend(config: SandboxServiceConfig) -> Backend:
    """The back-end that the configuration names."""
    if config.backend == "local":
        return LocalBackend(config)
    # Extras: only who uses one has its library.
    try:
        if config.backend == "docker":
            from sandbox_client.backends.docker.backend import DockerBackend

            return DockerBackend(config)
        from sandbox_client.backends.e2b.backend import E2BBackend
    except ModuleNotFoundError as error:
        raise StartupError(
            f'backend = "{config.backend}", but {error.name} is not installed; install '
            f"sandbox-client[{config.backend}]"
        ) from error
    return E2BBackend(config)


async def serve(config: SandboxServiceConfig) -> None:
    """Serves until SIGTERM or SIGINT; then every sandbox ends."""
    if config.backend == "local" and lacking_capabilities():
        _start_over_in_user_namespace(config)
    telemetry = setup_telemetry(config.telemetry, "sandbox-client")
    manager = SandboxManager(config, make_backend(config))
    server = Server(config.server, [sandbox_service(manager, config)], telemetry)
    try:
        await manager.start()
        try:
            register_gauges(manager)
            async with _e2b_api(manager, config):
                await run_until_signal(
                    server, [manager.reap_forever(), manager.keep_pool_forever()]
                )
        finally:
            await manager.stop()
    finally:
        telemetry.shutdown()


def _e2b_api(
    manager: SandboxManager, config: SandboxServiceConfig
) -> contextlib.AbstractAsyncContextManager[object]:
    """The E2B-compatible endpoint, where one is asked for."""
    if not config.e2b_api.bind:
        return contextlib.nullcontext()
    try:
        # An extra: only who serves it has these libraries.
        from sandbox_client.e2b_api.server import serving_e2b_api
    except ModuleNotFoundError as error:
        raise StartupError(
            f"e2b_api.bind is set, but {error.name} is not installed; install "
            "sandbox-client[e2b-api]"
        ) from error
    return serving_e2b_api(manager, config)


def _start_over_in_user_namespace(config: SandboxServiceConfig) -> None:
    """Executes this very command as root of a user namespace; the process stays the same."""
    require_isolation()
    argv = [sys.executable, *sys.orig_argv[1:]]
    command = inside_user_namespace(argv, config.local.uid, config.local.gid)
    os.execv(command[0], command)  # noqa: S606
