"""Puts the service and its host's receiver together."""

import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass

from service_kit.channel import Channel, ChannelConfig, open_channel
from service_kit.cli import run_until_signal
from service_kit.errors import StartupError
from service_kit.server import Server, Service
from service_kit.telemetry import setup_telemetry
from tailrace.weight_sync.v1 import weight_service_pb2
from tailrace.weight_sync.v1 import weight_service_pb2_grpc as pb_grpc

from weight_sync.client import WeightClient
from weight_sync.config import WeightSyncConfig
from weight_sync.core.registry import Registry
from weight_sync.receiver import Receiver
from weight_sync.service import SERVICE_NAME, WeightServicer
from weight_sync.shadow import ShadowFolder
from weight_sync.state import VersionLog
from weight_sync.stores import FolderStore


@dataclass(frozen=True)
class App:
    """What `serve` runs: a started server, and the receiver's life if there is one."""

    server: Server
    receiver: Receiver | None

    @property
    def background(self) -> list[Coroutine[None, None, None]]:
        """The work beside the server, to be run once."""
        return [self.receiver.run()] if self.receiver else []


async def serve(config: WeightSyncConfig) -> None:
    """Run what the config asks for until SIGTERM or SIGINT.

    Raises:
        StartupError: a port, folder or setting cannot be used.
    """
    telemetry = setup_telemetry(config.telemetry, "weight-sync")
    try:
        async with AsyncExitStack() as stack:
            app = await assemble(config, stack)
            await run_until_signal(app.server, app.background)
    finally:
        telemetry.shutdown()


async def assemble(config: WeightSyncConfig, stack: AsyncExitStack) -> App:
    """Start the server and make the receiver; `stack` gets whatever must be closed.

    Raises:
        StartupError: a port, folder or setting cannot be used.
    """
    services = [] if config.receiver.only else [_service(config, stack)]
    server = await stack.enter_async_context(Server(config.server, services))
    if not config.receiver.enabled:
        return App(server, None)
    channel = _channel(config, server)
    stack.push_async_callback(channel.close)
    shadows = ShadowFolder(config.shadow_folder, threads=config.receiver.threads)
    stack.callback(shadows.close)
    return App(server, Receiver(config.receiver, WeightClient(channel), shadows))


def _service(config: WeightSyncConfig, stack: AsyncExitStack) -> Service:
    log = VersionLog(config.state_dir)
    stack.callback(log.close)
    store = FolderStore(config.store_folder)
    servicer = WeightServicer(
        log,
        Registry(
            started_s=time.monotonic(),
            fresh=not log.current_run,
            max_lease_s=config.registry.max_lease_s,
            report_ttl_s=config.registry.report_ttl_s,
        ),
        store_uri=store.uri,
        read_manifest=store.read_manifest if config.store.verify_announced else None,
        heartbeat_s=config.registry.heartbeat_s,
        listed_versions=config.registry.listed_versions,
    )
    return Service(
        SERVICE_NAME,
        lambda server: pb_grpc.add_WeightServiceServicer_to_server(servicer, server),
        on_drain=servicer.drain,
    )


def _channel(config: WeightSyncConfig, server: Server) -> Channel:
    """Open the receiver's way to the service: to another host, or back into this process."""
    target = config.receiver.service
    if target is None and config.receiver.only:
        raise StartupError(
            "receiver.only needs receiver.service: set its target to the WeightService's address"
        )
    if target is None and config.server.tls_certificate is not None:
        raise StartupError(
            "the receiver cannot tell which authority signed server.tls_certificate: set "
            "receiver.service with this server's target and tls_ca"
        )
    if target is None:
        target = ChannelConfig(
            target=server.address,
            token=config.server.token,
            token_file=config.server.token_file,
        )
    return open_channel(target, contracts=[weight_service_pb2.DESCRIPTOR])
