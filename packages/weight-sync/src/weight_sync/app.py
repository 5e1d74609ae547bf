"""Puts the service and its host's receiver together."""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass

from service_kit.channel import ChannelConfig, open_channel
from service_kit.cli import run_until_signal
from service_kit.errors import StartupError
from service_kit.server import Server, Service
from service_kit.telemetry import setup_telemetry
from tailrace.weight_sync.v1 import file_service_pb2, weight_service_pb2
from tailrace.weight_sync.v1 import file_service_pb2_grpc as file_pb_grpc
from tailrace.weight_sync.v1 import weight_service_pb2_grpc as pb_grpc

from weight_sync.client import WeightClient
from weight_sync.config import CollectiveConfig, WeightSyncConfig
from weight_sync.core.registry import Registry
from weight_sync.errors import WeightSyncError
from weight_sync.files import SERVICE_NAME as FILE_SERVICE_NAME
from weight_sync.files import CopyFiles, FileServicer, FileSource, StoreFiles
from weight_sync.receiver import Receiver
from weight_sync.service import SERVICE_NAME, WeightServicer
from weight_sync.shadow import ShadowFolder
from weight_sync.state import VersionLog
from weight_sync.stores import FolderStore, Store, open_store
from weight_sync.telemetry import Instruments
from weight_sync.transports import FirstThatWorks, StoreTransport, Transport
from weight_sync.transports.collective import CollectiveTransport
from weight_sync.transports.grpc_stream import GrpcTransport
from weight_sync.transports.peer import PeerModels
from weight_sync.transports.remote import RemoteFiles


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
    copies = CopyFiles()
    sources: list[FileSource] = [copies] if config.receiver.peers else []
    services = [] if config.receiver.only else [_service(config, stack, sources)]
    if sources:
        services.append(_file_service(sources))
    server = await stack.enter_async_context(Server(config.server, services))
    if not config.receiver.enabled:
        return App(server, None)
    return App(server, _receiver(config, stack, server, copies))


def _service(config: WeightSyncConfig, stack: AsyncExitStack, sources: list[FileSource]) -> Service:
    log = VersionLog(config.state_dir)
    stack.callback(log.close)
    store = _store(config)
    sources.insert(0, StoreFiles(log, store))
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


def _store(config: WeightSyncConfig) -> Store:
    if not config.store.uri:
        return FolderStore.at(config.store_folder)
    try:
        return open_store(config.store.uri)
    except (ValueError, ImportError, WeightSyncError) as error:
        raise StartupError(f"store.uri: {error}") from error


def _file_service(sources: list[FileSource]) -> Service:
    servicer = FileServicer(sources)
    return Service(
        FILE_SERVICE_NAME,
        lambda server: file_pb_grpc.add_FileServiceServicer_to_server(servicer, server),
    )


def _receiver(
    config: WeightSyncConfig, stack: AsyncExitStack, server: Server, copies: CopyFiles
) -> Receiver:
    settings = config.receiver
    target = _target(config, server)
    channel = open_channel(
        target, contracts=[weight_service_pb2.DESCRIPTOR, file_service_pb2.DESCRIPTOR]
    )
    stack.push_async_callback(channel.close)
    client = WeightClient(channel)
    loop = asyncio.get_running_loop()
    files = RemoteFiles(
        channel,
        loop,
        where=target.target,
        call_timeout_s=settings.call_timeout_s,
        idle_timeout_s=settings.idle_timeout_s,
    )
    transports: list[Transport] = []
    for name in settings.transports:
        if name == "store":
            transports.append(StoreTransport())
        elif name == "grpc":
            transports.append(GrpcTransport(files))
        else:
            collective = _collective(settings.collective)
            stack.callback(collective.close)
            transports.append(collective)
    peers = PeerModels(
        client,
        target,
        loop,
        own_host=settings.host,
        call_timeout_s=settings.call_timeout_s,
        idle_timeout_s=settings.idle_timeout_s,
    )
    transfer_s = Instruments().transfer_s
    shadows = ShadowFolder(
        config.shadow_folder,
        transport=FirstThatWorks(
            transports,
            on_fetched=lambda transport, took_s: transfer_s.record(
                took_s, {"transport": type(transport).__name__}
            ),
        ),
        models=peers if settings.peers else None,
        threads=settings.threads,
    )
    stack.callback(shadows.close)
    return Receiver(
        settings,
        client,
        shadows,
        copies=copies,
        file_target=(settings.advertise or server.address) if settings.peers else "",
    )


def _collective(config: CollectiveConfig) -> CollectiveTransport:
    try:
        return CollectiveTransport(config)
    except WeightSyncError as error:
        raise StartupError(f"receiver.transports: {error}") from error


def _target(config: WeightSyncConfig, server: Server) -> ChannelConfig:
    """Return the receiver's way to the service: to another host, or back into this process."""
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
    return target
