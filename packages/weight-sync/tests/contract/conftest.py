"""A service on a free port, a channel to it, and engines that are not real."""

import asyncio
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
from weight_sync.config import ReceiverConfig, RegistryConfig, StoreConfig, WeightSyncConfig
from weight_sync.testing import FakeEngine

Weights = dict[str, "np.ndarray[Any, np.dtype[np.float32]]"]
Apps = Callable[..., Awaitable[App]]


def weights_of(seed: int) -> Weights:
    rng = np.random.default_rng(seed)
    shapes = {"embed": (64, 8), "layer.0.q": (8, 8), "layer.0.k": (8, 8), "norm": (8,)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


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


@pytest.fixture
async def engine(base_model: Path) -> AsyncIterator[FakeEngine]:
    async with FakeEngine(base_model) as engine:
        yield engine


@pytest.fixture
async def second_engine(base_model: Path) -> AsyncIterator[FakeEngine]:
    async with FakeEngine(base_model) as engine:
        yield engine
