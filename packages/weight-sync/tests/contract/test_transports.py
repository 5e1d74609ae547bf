"""Bytes for hosts that reach no store: over gRPC from the service, or from another receiver."""

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from service_kit.channel import Channel, ChannelConfig, open_channel
from service_kit.server import Server, ServerConfig, Service
from tailrace.weight_sync.v1 import file_service_pb2 as pb
from tailrace.weight_sync.v1 import file_service_pb2_grpc as pb_grpc
from weight_sync import PolicyVersion, Publisher, WeightClient
from weight_sync.app import assemble
from weight_sync.config import ReceiverConfig, StaticEngine, StoreConfig, WeightSyncConfig
from weight_sync.core.manifest import PayloadFile, digest
from weight_sync.errors import (
    ChecksumMismatch,
    ManifestError,
    PayloadMissing,
    StoreFull,
    TransportFailed,
)
from weight_sync.files import COPY, MANIFEST, FileServicer, VersionFile
from weight_sync.testing import FakeEngine, root_of
from weight_sync.transports import FirstThatWorks, StoreTransport
from weight_sync.transports.base import Fetched
from weight_sync.transports.grpc_stream import GrpcTransport
from weight_sync.transports.remote import RemoteFiles

Weights = Callable[[int], dict[str, Any]]


def remote(channel: Channel, **changes: Any) -> RemoteFiles:
    options: dict[str, Any] = {"where": "test", "call_timeout_s": 5.0, "idle_timeout_s": 2.0}
    options |= changes
    return RemoteFiles(channel, asyncio.get_running_loop(), **options)


async def published(client: WeightClient, publisher: Publisher, weights: Any) -> Any:
    await publisher.publish(weights, step=1)
    return (await client.list_versions(timeout_s=5)).versions[-1]


async def test_manifest_and_payload_come_over_the_service_s_own_connection(
    channel: Channel, client: WeightClient, publisher: Publisher, weights: Weights, tmp_path: Path
) -> None:
    announced = await published(client, publisher, weights(1))
    transport = GrpcTransport(remote(channel))
    manifest = await asyncio.to_thread(transport.read_manifest, announced.manifest_uri)
    assert manifest.version == announced.version
    (payload,) = manifest.payloads
    into = tmp_path / "payload"
    fetched = await asyncio.to_thread(transport.fetch, announced.manifest_uri, payload, into)
    assert fetched == Fetched(into, payload.size_bytes)
    assert digest(into.read_bytes()) == payload.checksum


async def test_only_files_of_announced_versions_can_be_read(
    channel: Channel, client: WeightClient, publisher: Publisher, weights: Weights
) -> None:
    await published(client, publisher, weights(1))
    files = remote(channel)
    (manifest, payload) = await asyncio.to_thread(files.files, "run", 1)
    assert manifest.name == MANIFEST
    assert len(await asyncio.to_thread(files.read, "run", 1, payload.name)) == payload.size_bytes
    for run, number, name in [
        ("run", 2, MANIFEST),
        ("other", 1, MANIFEST),
        ("run", 1, "../0000000001-0001/" + payload.name),
        ("run", 1, "/etc/passwd"),
        ("run", 1, COPY + "model.safetensors"),
    ]:
        with pytest.raises(PayloadMissing, match="Go to the newest version"):
            await asyncio.to_thread(files.read, run, number, name)


async def test_a_manifest_that_was_tampered_with_is_refused(
    channel: Channel, client: WeightClient, publisher: Publisher, weights: Weights
) -> None:
    announced = await published(client, publisher, weights(1))
    folder, _ = announced.manifest_uri.rsplit("/", 1)
    transport = GrpcTransport(remote(channel))
    with pytest.raises(ManifestError, match="does not match the id"):
        await asyncio.to_thread(transport.read_manifest, f"{folder}/manifest-{'0' * 32}.json")
    with pytest.raises(ManifestError, match="expected a URI of a version's manifest"):
        await asyncio.to_thread(transport.read_manifest, f"file:///manifest-{'0' * 32}.json")


class Flaky(FileServicer):
    """A server whose streams break off, or flip bits, as a test asks."""

    def __init__(self, data: bytes) -> None:
        super().__init__([self])
        self.data = data
        self.break_after = 0
        """Pieces after which each stream ends early; 0: never."""
        self.flips = 0
        """So many pieces more arrive with a flipped bit."""
        self.silent = False
        self.streams = 0

    def files(self, run: str, number: int) -> list[VersionFile]:
        return [VersionFile("file", len(self.data))]

    def open(self, run: str, number: int, name: str) -> Any:
        return io.BytesIO(self.data)

    async def ReadFile(self, request: Any, context: Any) -> AsyncIterator[pb.ReadFileResponse]:
        self.streams += 1
        if self.silent:
            await asyncio.Event().wait()
        pieces = 0
        async for piece in super().ReadFile(request, context):
            if self.flips:
                self.flips -= 1
                piece.data = bytes([piece.data[0] ^ 1]) + piece.data[1:]
            yield piece
            pieces += 1
            if pieces == self.break_after:
                return


@asynccontextmanager
async def flaky(data: bytes) -> AsyncIterator[tuple[Flaky, Channel]]:
    servicer = Flaky(data)
    service = Service(
        "tailrace.weight_sync.v1.FileService",
        lambda server: pb_grpc.add_FileServiceServicer_to_server(servicer, server),
    )
    async with (
        Server(ServerConfig(drain_grace_s=0.1), [service]) as server,
        open_channel(ChannelConfig(target=server.address)) as channel,
    ):
        yield servicer, channel


DATA = bytes(range(251)) * 20_000  # five messages


async def test_a_stream_that_breaks_off_is_resumed_where_it_broke(tmp_path: Path) -> None:
    async with flaky(DATA) as (server, channel):
        server.break_after = 1
        into = tmp_path / "file"
        file = VersionFile("file", len(DATA))
        await asyncio.to_thread(remote(channel).fetch, "run", 1, file, into)
        assert into.read_bytes() == DATA
        assert server.streams > 2


async def test_a_piece_that_was_flipped_on_its_way_is_read_again(tmp_path: Path) -> None:
    async with flaky(DATA) as (server, channel):
        server.flips = 2
        into = tmp_path / "file"
        file = VersionFile("file", len(DATA))
        await asyncio.to_thread(remote(channel, streams=1).fetch, "run", 1, file, into)
        assert into.read_bytes() == DATA
        assert server.streams >= 2


async def test_a_line_that_always_flips_is_given_up_and_leaves_nothing(tmp_path: Path) -> None:
    async with flaky(DATA) as (server, channel):
        server.flips = 1 << 30
        with pytest.raises(TransportFailed, match="broke off at byte 0"):
            await asyncio.to_thread(
                remote(channel, streams=1).fetch,
                "run",
                1,
                VersionFile("file", len(DATA)),
                tmp_path / "file",
            )
        assert not any(tmp_path.iterdir())  # noqa: ASYNC240


async def test_a_file_that_is_shorter_than_it_should_be_is_missing_bytes_not_a_bad_line(
    tmp_path: Path,
) -> None:
    async with flaky(DATA) as (server, channel):
        file = VersionFile("file", len(DATA) + 1)
        with pytest.raises(PayloadMissing, match=f"no byte {len(DATA)} of 'file' is here"):
            await asyncio.to_thread(remote(channel).fetch, "run", 1, file, tmp_path / "file")
        assert server.streams == 2


async def test_a_silent_server_is_given_up(tmp_path: Path) -> None:
    async with flaky(DATA) as (server, channel):
        server.silent = True
        with pytest.raises(TransportFailed, match="silent"):
            await asyncio.to_thread(remote(channel, idle_timeout_s=0.05).read, "run", 1, "file")


async def test_a_payload_other_than_the_manifest_names_is_refused(tmp_path: Path) -> None:
    async with flaky(DATA) as (_, channel):
        payload = PayloadFile("file", len(DATA), digest(b"other"))
        uri = f"file:///store/run/0000000001-0001/manifest-{'0' * 32}.json"
        with pytest.raises(ChecksumMismatch, match="expected checksum"):
            await asyncio.to_thread(
                GrpcTransport(remote(channel)).fetch, uri, payload, tmp_path / "file"
            )
        assert not any(tmp_path.iterdir())  # noqa: ASYNC240


class Broken:
    """A transport that fails in one way."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.calls = 0

    def read_manifest(self, uri: str) -> Any:
        self.calls += 1
        raise self.error

    def fetch(
        self, manifest_uri: str, payload: PayloadFile, into: Path, *, read: bool = False
    ) -> Any:
        self.calls += 1
        into.write_text("torn")
        raise self.error


async def test_transports_are_tried_in_turn(
    client: WeightClient, publisher: Publisher, weights: Weights, tmp_path: Path
) -> None:
    announced = await published(client, publisher, weights(1))
    first, second = Broken(TransportFailed("x")), Broken(OSError("y"))
    used: list[object] = []
    store = StoreTransport()
    transport = FirstThatWorks(
        [first, second, store], on_fetched=lambda transport, _: used.append(transport)
    )
    manifest = transport.read_manifest(announced.manifest_uri)
    transport.fetch(announced.manifest_uri, manifest.payloads[0], tmp_path / "file")
    assert (first.calls, second.calls, used) == (2, 2, [store])
    assert digest((tmp_path / "file").read_bytes()) == manifest.payloads[0].checksum
    last = FirstThatWorks([first, second])
    with pytest.raises(OSError, match="y"):
        last.read_manifest(announced.manifest_uri)


async def test_a_full_disk_is_not_blamed_on_the_transport(tmp_path: Path) -> None:
    first, second = Broken(StoreFull("full")), Broken(TransportFailed("never asked"))
    with pytest.raises(StoreFull):
        FirstThatWorks([first, second]).fetch("", PayloadFile("x", 0, "0" * 32), tmp_path / "x")
    assert second.calls == 0


@asynccontextmanager
async def receiver_alone(
    config: WeightSyncConfig, engine: FakeEngine, host: str, **changes: Any
) -> AsyncIterator[Any]:
    """A receiver on "another host", following the service that `config` names."""
    far = ReceiverConfig(
        only=True,
        host=host,
        engines=(StaticEngine(url=engine.url),),
        poll_interval_s=0.02,
        report_interval_s=0.05,
        retry_s=0.02,
        shadow_folder=config.state_dir / host,
        **changes,
    )
    async with AsyncExitStack() as stack:
        app = await assemble(config.model_copy(update={"receiver": far}), stack)
        work = [asyncio.create_task(each) for each in app.background]
        try:
            yield app
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)


async def reached(client: WeightClient, version: PolicyVersion, engines: int) -> None:
    found = await client.await_version(version.number, engines=engines, timeout_s=20)
    assert found.engines >= engines, await client.list_nodes(timeout_s=5)


async def offered(client: WeightClient) -> None:
    """Wait until a receiver offers its copy."""
    async with asyncio.timeout(20):
        while not any(  # noqa: ASYNC110
            n.copy_numbers for n in (await client.list_nodes(timeout_s=5)).nodes
        ):
            await asyncio.sleep(0.02)


async def test_a_host_that_does_not_see_the_store_is_served_over_grpc(
    config: WeightSyncConfig,
    service: Any,
    client: WeightClient,
    publisher: Publisher,
    weights: Weights,
    engine: FakeEngine,
) -> None:
    target = ChannelConfig(target=service.address)
    async with receiver_alone(config, engine, "far", service=target, transports=("grpc",)):
        for seed in (1, 2):
            version = await publisher.publish(weights(seed), step=seed)
            await reached(client, version, 1)
        assert engine.root() == root_of({n: a.tobytes() for n, a in weights(2).items()})


async def test_a_late_joiner_takes_the_copy_of_another_receiver(
    config: WeightSyncConfig,
    service: Any,
    client: WeightClient,
    publisher: Publisher,
    weights: Weights,
    engine: FakeEngine,
    second_engine: FakeEngine,
) -> None:
    target = ChannelConfig(target=service.address)
    options: dict[str, Any] = {"service": target, "peers": True}
    async with receiver_alone(config, engine, "first", **options):
        version = await publisher.publish(weights(1), step=1)
        await reached(client, version, 1)
        await offered(client)
        # From now on no payload is to be had: only the manifest, and the peer's copy.
        announced = (await client.list_versions(timeout_s=5)).versions[-1]
        for payload in Path(announced.manifest_uri.removeprefix("file://")).parent.glob("model*"):
            payload.unlink()
        async with receiver_alone(config, second_engine, "late", **options):
            await reached(client, version, 2)
        assert second_engine.root() == engine.root()


async def test_a_peer_that_hands_out_other_bytes_is_not_believed(
    config: WeightSyncConfig,
    service: Any,
    client: WeightClient,
    publisher: Publisher,
    weights: Weights,
    engine: FakeEngine,
    second_engine: FakeEngine,
) -> None:
    target = ChannelConfig(target=service.address)
    options: dict[str, Any] = {"service": target, "peers": True}
    async with receiver_alone(config, engine, "first", **options):
        version = await publisher.publish(weights(1), step=1)
        await reached(client, version, 1)
        await offered(client)
        (copy,) = (config.state_dir / "first").glob("*/model.safetensors")
        data = bytearray(copy.read_bytes())
        data[-1] ^= 1
        copy.unlink()  # its bytes are shared with the store's file
        copy.write_bytes(data)
        async with receiver_alone(config, second_engine, "late", **options):
            await reached(client, version, 2)
        # It came from the store then.
        assert second_engine.root() == engine.root()


async def test_versions_go_through_an_object_store(
    config: WeightSyncConfig, run_service: Any, weights: Weights, engine: FakeEngine
) -> None:
    """fsspec's own memory stands in for the bucket; the receiver downloads."""
    receiver = ReceiverConfig(
        host="host",
        engines=(StaticEngine(url=engine.url),),
        poll_interval_s=0.02,
        transports=("store",),
        shadow_folder=config.state_dir / "shadow",
    )
    changed = config.model_copy(
        update={"receiver": receiver, "store": StoreConfig(uri="memory://bucket/prefix")}
    )
    async with (
        run_service(changed) as service,
        open_channel(ChannelConfig(target=service.address)) as channel,
    ):
        publisher = await Publisher.acquire(channel, run="run", keep_latest=1)
        for seed in (1, 2, 3):
            version = await publisher.publish(weights(seed), step=seed)
            await reached(WeightClient(channel), version, 1)
        assert engine.root() == root_of({n: a.tobytes() for n, a in weights(3).items()})
        announced = (await WeightClient(channel).list_versions(timeout_s=5)).versions[-1]
        assert announced.manifest_uri.startswith("memory://")
