"""Disks that fill up at any write, of store, receiver and service: nothing torn, and all heals."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from service_kit.channel import ChannelConfig, open_channel
from service_kit.errors import ServiceError
from service_kit.server import ServerConfig
from weight_sync import PublishConfig, Publisher, WeightClient
from weight_sync.app import assemble
from weight_sync.config import ReceiverConfig, StaticEngine, StoreConfig, WeightSyncConfig
from weight_sync.core.manifest import digest
from weight_sync.errors import StoreFull
from weight_sync.testing import FakeEngine

from integration_tests.harness import needs_root, small_disk
from integration_tests.weight_chaos.checker import Checker
from integration_tests.weight_chaos.roles import checksums_of, weights_of

PAGE = 4096
DISK = 2048 * PAGE
NAMES = ("store", "shadow", "state")


@asynccontextmanager
async def syncing(folder: Path, engine: FakeEngine) -> AsyncIterator[Any]:
    """Service, receiver and publisher in this process, which alone sees the small disk."""
    config = WeightSyncConfig(
        server=ServerConfig(bind="127.0.0.1:0", drain_grace_s=0.1),
        state_dir=folder / "state" / "weights",
        store=StoreConfig(folder=folder / "store" / "versions"),
        receiver=ReceiverConfig(
            host="host",
            engines=(StaticEngine(url=engine.url),),
            shadow_folder=folder / "shadow" / "copies",
            transports=("store",),
            poll_interval_s=0.02,
            retry_s=0.02,
            max_retry_s=0.05,
        ),
    )
    async with AsyncExitStack() as stack:
        app = await assemble(config, stack)
        work = [asyncio.create_task(each) for each in app.background]
        try:
            channel = await stack.enter_async_context(
                open_channel(ChannelConfig(target=app.server.address))
            )
            deltas = PublishConfig(codec="ulp-gap", anchor_every=4)
            publisher = await Publisher.acquire(channel, run="run", config=deltas, keep_latest=1)
            yield publisher, WeightClient(channel)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)


def fill(disk: Path, leave_bytes: int) -> Path:
    """Leave so much room on a disk."""
    filler = disk / "filler"
    stat = os.statvfs(disk)
    with filler.open("wb") as file:
        if (size := stat.f_bavail * stat.f_bsize - leave_bytes) > 0:
            os.posix_fallocate(file.fileno(), 0, size)
    return filler


@needs_root
@pytest.mark.parametrize("full", NAMES)
async def test_a_disk_that_is_full_at_any_write_tears_nothing(tmp_path: Path, full: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    safetensors.numpy.save_file(dict(weights_of(0)), model / "model.safetensors")
    checker = Checker()
    with small_disk(tmp_path / full, DISK):
        async with FakeEngine(model) as engine, syncing(tmp_path, engine) as (publisher, client):

            async def publish(step: int) -> int:
                weights = weights_of(step)
                # By its number, whether or not it gets through.
                checker.published(str(publisher._next), checksums_of(weights))
                version = await publisher.publish(weights, step=step, timeout_s=2)
                return int(version.number)

            refusals = []
            for pages in range(12):
                number = await publish(2 * pages)
                assert (await client.await_version(number, timeout_s=10)).engines == 1
                filler = fill(tmp_path / full, pages * PAGE)
                try:
                    number = await publish(2 * pages + 1)
                except (StoreFull, ServiceError) as error:
                    refusals.append(str(error))
                with suppress(ServiceError):
                    await client.await_version(number, timeout_s=0.3)
                look(checker, engine)
                filler.unlink()
                # What could not be prepared is prepared by itself, once there is room.
                assert (await client.await_version(number, timeout_s=10)).engines == 1
                look(checker, engine)
            assert engine.unpaused_loads == 0
            # A receiver's full disk is not the publisher's matter.
            assert (len(refusals) == 0) == (full == "shadow")
            assert all("space" in refusal for refusal in refusals)
    assert not checker.violations, checker.violations


def look(checker: Checker, engine: FakeEngine) -> None:
    if not engine.paused:
        held = {name: digest(data) for name, data in engine.tensors.items()}
        checker.looked("engine", engine.label, held)
