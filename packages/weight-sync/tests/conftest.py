"""A service on a free port, a channel to it, engines that are not real, versions for stores."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from service_kit.channel import Channel, ChannelConfig, open_channel
from service_kit.server import ServerConfig
from tailrace.weight_sync.v1 import weight_service_pb2
from weight_sync import Publisher, WeightClient
from weight_sync.app import App, assemble
from weight_sync.codecs import Tensor, safetensors_file
from weight_sync.config import ReceiverConfig, RegistryConfig, StoreConfig, WeightSyncConfig
from weight_sync.core.manifest import build_manifest
from weight_sync.stores import Publication, Store
from weight_sync.testing import FakeEngine

Weights = dict[str, "np.ndarray[Any, np.dtype[np.float32]]"]
Apps = Callable[..., Awaitable[App]]


def weights_of(step: int) -> Weights:
    """The weights after so many steps, of which each changes about one element in eight."""
    rng = np.random.default_rng(0)
    shapes = {"embed": (64, 8), "layer.0.q": (8, 8), "layer.0.k": (8, 8), "norm": (8,)}
    weights = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    for _ in range(step):
        for array in weights.values():
            array.view(np.uint32)[...] += rng.random(array.shape) < 0.125
    return weights


@pytest.fixture
def weights() -> Callable[[int], Weights]:
    return weights_of


@pytest.fixture
def base_model(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    safetensors.numpy.save_file(weights_of(0), folder / "model.safetensors")
    return folder


@pytest.fixture
def config(tmp_path: Path) -> WeightSyncConfig:
    """A service without a receiver; everything in the test's own folder."""
    return WeightSyncConfig(
        server=ServerConfig(bind="127.0.0.1:0", drain_grace_s=1),
        state_dir=tmp_path / "state",
        store=StoreConfig(folder=tmp_path / "store"),
        registry=RegistryConfig(heartbeat_s=0.05, listed_versions=10),
        receiver=ReceiverConfig(enabled=False),
    )


class Service:
    """One life of the service after another, on the same state and port."""

    def __init__(self, config: WeightSyncConfig) -> None:
        self.config = config
        self.app: App | None = None
        self._stack = AsyncExitStack()
        self._work: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._stack = AsyncExitStack()
        self.app = await assemble(self.config, self._stack)
        # The next life must be where the clients look for it.
        server = self.config.server.model_copy(update={"bind": self.app.server.address})
        self.config = self.config.model_copy(update={"server": server})
        self._work = [asyncio.create_task(work) for work in self.app.background]

    async def stop(self) -> None:
        for task in self._work:
            task.cancel()
        ended = await asyncio.gather(*self._work, return_exceptions=True)
        await self._stack.aclose()
        for error in ended:
            # A receiver that died of a bug must not pass for one that was stopped.
            if error is not None and not isinstance(error, asyncio.CancelledError):
                raise error

    @property
    def address(self) -> str:
        assert self.app is not None
        return self.app.server.address


@asynccontextmanager
async def running(config: WeightSyncConfig) -> AsyncIterator[Service]:
    service = Service(config)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


@pytest.fixture
async def service(config: WeightSyncConfig) -> AsyncIterator[Service]:
    async with running(config) as service:
        yield service


@pytest.fixture
def run_service() -> Callable[[WeightSyncConfig], Any]:
    return running


@pytest.fixture
async def channel(service: Service) -> AsyncIterator[Channel]:
    config = ChannelConfig(target=service.address, max_reconnect_backoff_s=0.1)
    async with open_channel(config, contracts=[weight_service_pb2.DESCRIPTOR]) as channel:
        yield channel


@pytest.fixture
def client(channel: Channel) -> WeightClient:
    return WeightClient(channel)


@pytest.fixture
async def publisher(channel: Channel) -> Publisher:
    return await Publisher.acquire(channel, run="run")


KILLED = """
import asyncio, os, pathlib, signal, sys
import numpy as np
from service_kit.channel import ChannelConfig, open_channel
from weight_sync import FolderStore, PublishConfig, Publisher

async def main(address, root, codec, version, at):
    publishing, seen = 0, -1
    def kill(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)
    def on_step(step):
        nonlocal seen
        seen += publishing == version
        if seen == at:
            kill()
    store = FolderStore(pathlib.Path(root), on_step=on_step if at >= 0 else lambda step: None)
    async with open_channel(ChannelConfig(target=address, wait_for_ready=True)) as channel:
        config = PublishConfig(codec=codec)
        publisher = await Publisher.acquire(channel, run="run", store=store, config=config)
        weights = {"w": np.arange(900, dtype=np.float32)}
        for publishing in range(1, version + 1):
            if at < 0 and publishing == version:
                publisher._client.announce = kill
            await publisher.publish(weights, step=publishing)
            weights["w"][::9] += 1

asyncio.run(main(*sys.argv[1:4], *map(int, sys.argv[4:])))
"""


@pytest.fixture
def kill_publisher(service: Service, config: WeightSyncConfig) -> Callable[..., Awaitable[None]]:
    """Run a publisher that dies in the midst of its version number `version`.

    It dies just before step `at` of the file system, or below 0 once the version is committed.
    """

    async def run(codec: str, *, version: int, at: int) -> None:
        command = [sys.executable, "-c", KILLED, service.address, str(config.store_folder)]
        command += [codec, str(version), str(at)]
        killed = await asyncio.to_thread(subprocess.run, command, timeout=60, check=False)
        assert killed.returncode == -signal.SIGKILL

    return run


@pytest.fixture
async def engine(base_model: Path) -> AsyncIterator[FakeEngine]:
    async with FakeEngine(base_model) as engine:
        yield engine


@pytest.fixture
async def second_engine(base_model: Path) -> AsyncIterator[FakeEngine]:
    async with FakeEngine(base_model) as engine:
        yield engine


class Versions:
    """The version with a number holds that number in every byte."""

    @staticmethod
    def model(number: int) -> list[Tensor]:
        bits = bytes([number]) * (3 << 20)  # several writes
        return [
            Tensor("b", "BF16", (2,), memoryview(bytes([number, 0, 0, number]))),
            Tensor("a", "U8", (len(bits),), memoryview(bits)),
        ]

    @staticmethod
    def put(store: Store, number: int, incarnation: int = 1, run: str = "run") -> str:
        return Versions.fill(store.begin(run, number, incarnation), number, incarnation, run)

    @staticmethod
    def fill(publication: Publication, number: int, incarnation: int = 1, run: str = "run") -> str:
        tensors = Versions.model(number)
        pieces: list[bytes | memoryview] = [safetensors_file.header(tensors)]
        pieces += [tensor.data for tensor in tensors]
        payload = publication.write("model.safetensors", pieces)
        manifest = build_manifest(
            run=run,
            incarnation=incarnation,
            number=number,
            step=number,
            parent=0,
            codec="dense",
            tensors=[tensor.entry() for tensor in tensors],
            payloads=[payload],
        )
        return publication.commit(manifest)

    @staticmethod
    def assert_whole(store: Store, uri: str, number: int) -> None:
        manifest = store.read_manifest(uri)
        assert manifest.version.number == number
        (payload,) = manifest.payloads
        data = store.read_bytes(f"{uri.rsplit('/', 1)[0]}/{payload.name}")
        found = {t.name: t for t in safetensors_file.tensors(memoryview(data))}
        for entry in manifest.tensors:
            found[entry.name].verify(entry)


@pytest.fixture
def versions() -> type[Versions]:
    return Versions
