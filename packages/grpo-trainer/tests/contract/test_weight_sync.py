"""Publishing to the real WeightService: order, fencing, patience while it restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from grpo_trainer.errors import FencedOff
from grpo_trainer.weights import WeightSyncPublisher
from service_kit.channel import Channel, ChannelConfig, open_channel
from service_kit.errors import ServiceError
from tailrace.weight_sync.v1 import weight_service_pb2
from weight_sync.app import assemble
from weight_sync.client import WeightClient
from weight_sync.config import WeightSyncConfig
from weight_sync.publisher import PublishConfig

WEIGHTS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}


@asynccontextmanager
async def weight_service(folder: Path, bind: str = "127.0.0.1:0") -> AsyncIterator[str]:
    config = WeightSyncConfig.model_validate(
        {
            "state_dir": folder / "state",
            "store": {"folder": folder / "store"},
            "receiver": {"enabled": False},
            "server": {"bind": bind, "drain_grace_s": 0},
        }
    )
    async with AsyncExitStack() as stack:
        yield (await assemble(config, stack)).server.address


def channel(address: str) -> Channel:
    return open_channel(
        ChannelConfig(target=address, max_reconnect_backoff_s=0.1),
        contracts=[weight_service_pb2.DESCRIPTOR],
    )


async def acquire(
    to: Channel,
    *,
    known_number: int = 0,
    patience_s: float = 20.0,
    config: PublishConfig | None = None,
) -> WeightSyncPublisher:
    return await WeightSyncPublisher.acquire(
        to,
        run="run",
        known_number=known_number,
        acquire_timeout_s=10,
        publish_timeout_s=patience_s,
        config=config,
    )


async def test_numbers_go_on_above_what_a_checkpoint_knows(tmp_path: Path) -> None:
    async with weight_service(tmp_path) as address, channel(address) as to:
        first = await acquire(to)
        assert [(await first.publish(WEIGHTS, step=s, parent=s)).number for s in (0, 1)] == [1, 2]
        second = await acquire(to, known_number=7)
        assert second.incarnation == first.incarnation + 1
        version = await second.publish(WEIGHTS, step=2, parent=2)
        assert (version.number, version.step, version.parent) == (8, 2, 2)


async def test_versions_go_out_as_the_config_says(tmp_path: Path) -> None:
    async with weight_service(tmp_path) as address, channel(address) as to:
        publisher = await acquire(to, config=PublishConfig(codec="ulp-gap", anchor_every=2))
        for step in range(3):
            await publisher.publish(WEIGHTS, step=step, parent=step)
        known = await WeightClient(to).list_versions("run", timeout_s=5)
        assert [v.base for v in known.versions] == [0, 1, 0]


async def test_an_older_trainer_is_fenced_off(tmp_path: Path) -> None:
    async with weight_service(tmp_path) as address, channel(address) as to:
        old = await acquire(to)
        await acquire(to)
        with pytest.raises(FencedOff):
            await old.publish(WEIGHTS, step=1, parent=0)


async def test_publishing_outlives_a_restart_of_the_service(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(AsyncExitStack())
        address = await first.enter_async_context(weight_service(tmp_path))
        to = await stack.enter_async_context(channel(address))
        publisher = await acquire(to)
        await publisher.publish(WEIGHTS, step=0, parent=0)
        await first.aclose()
        publishing = asyncio.ensure_future(publisher.publish(WEIGHTS, step=1, parent=1))
        await asyncio.sleep(0.3)
        assert not publishing.done()
        await stack.enter_async_context(weight_service(tmp_path, address))
        version = await asyncio.wait_for(publishing, 20)
        assert version.step == 1
        known = await WeightClient(to).list_versions("run", timeout_s=5)
        assert [v.version.step for v in known.versions] == [0, 1]


async def test_patience_has_an_end(tmp_path: Path) -> None:
    async with weight_service(tmp_path) as address, channel(address) as to:
        publisher = await acquire(to, patience_s=1.0)
        lost = address
    async with channel(lost) as to:
        publisher._publisher._client = WeightClient(to)
        with pytest.raises((ServiceError, TimeoutError)):
            await asyncio.wait_for(publisher.publish(WEIGHTS, step=1, parent=0), 15)


async def test_waiting_for_engines_that_do_not_come_ends(tmp_path: Path) -> None:
    async with weight_service(tmp_path) as address, channel(address) as to:
        publisher = await acquire(to, patience_s=0.5)
        version = await publisher.publish(WEIGHTS, step=0, parent=0)
        with pytest.raises(TimeoutError, match="not every engine serves version 1"):
            await publisher.await_everywhere(version.number)
