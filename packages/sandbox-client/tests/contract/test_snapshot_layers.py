"""Snapshots as layers of overlays: how long they stay, and how much they may take."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sandbox_client import EnvironmentTree, EnvironmentUnknown, QuotaExhausted, TooLarge

StartService = Callable[..., Any]
BACKENDS = ("local", "docker")


def stored(running: Any) -> set[str]:
    return {path.name for path in (running.state_dir / "environments" / "snapshots").iterdir()}


async def test_a_layer_is_kept_once_and_removed_with_the_last_that_needs_it(
    start_service: StartService, repository: EnvironmentTree
) -> None:
    running = start_service("lease.reap_interval_s=0.1")
    async with running.client(lease_s=2) as client:
        boxes = [await client.create(repository) for _ in range(2)]
        for box in boxes:
            await box.run("echo same > same.txt")
        one, two = [await box.snapshot() for box in boxes]
        assert one.id != two.id
        assert len(stored(running)) == 1
        gauges = {s.name: s.in_use for s in (await client.status()).limiters}
        assert (gauges["snapshots"], gauges["snapshots_bytes"]) == (2, one.size_bytes)
        fork = await client.create(snapshot=two)
        await one.destroy()
        await two.destroy()
        assert len(stored(running)) == 1
        await fork.destroy()
        await asyncio.sleep(0.5)
        assert stored(running) == set()
        # Renewed while its client lives, and over with it.
        kept = await boxes[0].snapshot()
        await asyncio.sleep(3)
        await (await client.create(snapshot=kept)).destroy()
        client._renewing.cancel()
        await asyncio.sleep(3)
        assert stored(running) == set()
        with pytest.raises(EnvironmentUnknown):
            await client.create(snapshot=kept)


async def test_snapshots_are_bounded_in_number_and_size_and_end_with_the_service(
    start_service: StartService, repository: EnvironmentTree
) -> None:
    running = start_service(
        "limits.snapshots=2", f"limits.snapshots_bytes={3 << 20}", f"limits.upload_bytes={2 << 20}"
    )
    async with running.client() as client:
        sandbox = await client.create(repository)
        await sandbox.run("head -c 1500000 /dev/urandom > data")
        await sandbox.snapshot()
        await sandbox.run("head -c 1800000 /dev/urandom > data")
        with pytest.raises(QuotaExhausted, match="snapshots_bytes") as caught:
            await sandbox.snapshot()
        assert caught.value.retry_after_s
        await sandbox.run("truncate -s 100G data")
        with pytest.raises(TooLarge, match="upload_bytes"):
            await sandbox.snapshot()
        await sandbox.run("rm data")
        await sandbox.snapshot()
        with pytest.raises(QuotaExhausted, match=r"limits\.snapshots "):
            await sandbox.snapshot()
        assert len(stored(running)) == 2
        running.kill()
        running.start()
        assert stored(running) == set()
        sandbox.gone = True
        client._connected.snapshot_ids.clear()
