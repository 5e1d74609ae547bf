import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from service_kit.channel import Channel
from service_kit.errors import ServiceError, Unavailable
from weight_sync import (
    EngineEndpoint,
    EngineReport,
    FolderStore,
    Manifest,
    Publisher,
    RawTensor,
    WeightClient,
)
from weight_sync.codecs import Dense
from weight_sync.config import WeightSyncConfig
from weight_sync.core.receiver import Phase
from weight_sync.errors import Fenced, ManifestError, PayloadMissing, StoreFull
from weight_sync.stores.folder import path_of


def publisher_store(config: WeightSyncConfig) -> FolderStore:
    return FolderStore(config.store_folder)


Weights = Callable[[int], dict[str, Any]]


async def test_a_published_version_is_announced_with_its_lineage(
    publisher: Publisher, client: WeightClient, weights: Weights
) -> None:
    first = await publisher.publish(weights(1), step=3)
    second = await publisher.publish(weights(2), step=4)
    assert (first.number, first.incarnation, first.step, first.parent) == (1, 1, 3, 0)
    assert (second.number, second.incarnation, second.step, second.parent) == (2, 1, 4, 1)
    listed = await client.list_versions(timeout_s=5)
    assert [v.version for v in listed.versions] == [first, second]
    assert publisher.last is not None
    assert publisher.last.version == second
    assert publisher.last.payload_bytes == listed.versions[-1].payload_bytes


async def test_the_payload_holds_the_tensors_bit_by_bit(
    publisher: Publisher, client: WeightClient
) -> None:
    bits = np.array([0x0000, 0x8000, 0x7FC1, 0xFF80], np.uint16)  # 0, -0, a NaN, -inf
    await publisher.publish(
        {"w": np.eye(3, dtype=np.float32), "b": RawTensor(bits, "BF16")}, step=1
    )
    (announced,) = (await client.list_versions(timeout_s=5)).versions
    manifest = Manifest.from_bytes(path_of(announced.manifest_uri).read_bytes())
    folder = path_of(announced.manifest_uri).parent
    data = (folder / manifest.payloads[0].name).read_bytes()
    found = {t.name: t for t in Dense().decode(memoryview(data))}
    assert (found["b"].dtype, bytes(found["b"].data)) == ("BF16", bits.tobytes())
    assert bytes(found["w"].data) == np.eye(3, dtype=np.float32).tobytes()


async def test_equal_weights_have_equal_roots_and_different_numbers(
    publisher: Publisher, weights: Weights
) -> None:
    first = await publisher.publish(weights(1), step=1)
    second = await publisher.publish(weights(1), step=1)
    third = await publisher.publish(weights(2), step=2)
    assert first.root_hash == second.root_hash != third.root_hash
    assert [v.number for v in (first, second, third)] == [1, 2, 3]


async def test_a_resumed_run_fences_off_the_old_publisher(
    channel: Channel, publisher: Publisher, client: WeightClient, weights: Weights
) -> None:
    await publisher.publish(weights(1), step=1)
    resumed = await Publisher.acquire(channel, run="run")
    with pytest.raises(Fenced, match="incarnation 2 publishes"):
        await publisher.publish(weights(2), step=2)
    version = await resumed.publish(weights(3), step=1, parent=1)
    # Number 2 was written by the old one, though never announced: it is not used again.
    assert (version.number, version.incarnation, version.parent) == (2, 2, 1)
    listed = await client.list_versions(timeout_s=5)
    assert [(v.version.number, v.version.incarnation) for v in listed.versions] == [(1, 1), (2, 2)]


async def test_a_version_that_is_swept_while_it_is_written_can_be_tried_again(
    channel: Channel, config: WeightSyncConfig, weights: Weights
) -> None:
    """So the one that was fenced off gets to hear it, by the next announcement."""
    folder = config.store_folder

    def sweep(step: str) -> None:
        if step == "rename .manifest.part":
            shutil.rmtree(folder / "run")

    old = await Publisher.acquire(channel, run="run", store=FolderStore(folder, on_step=sweep))
    with pytest.raises(PayloadMissing, match="another publisher took over run run") as caught:
        await old.publish(weights(1), step=1)
    assert caught.value.retryable
    await Publisher.acquire(channel, run="run")
    old._store = FolderStore(folder)
    with pytest.raises(Fenced):
        await old.publish(weights(1), step=1)


async def test_numbers_go_on_above_a_checkpoint_s(channel: Channel, weights: Weights) -> None:
    publisher = await Publisher.acquire(channel, run="run", known_number=120)
    assert (await publisher.publish(weights(1), step=9, parent=120)).number == 121


async def test_a_failed_version_costs_its_number_and_nothing_else(
    channel: Channel, tmp_path: Path, client: WeightClient, weights: Weights
) -> None:
    full = False

    def on_step(step: str) -> None:
        if full and step.startswith("write"):
            raise OSError(28, "No space left on device")

    store = FolderStore(tmp_path / "store", on_step=on_step)
    publisher = await Publisher.acquire(channel, run="run", store=store)
    await publisher.publish(weights(1), step=1)
    full = True
    with pytest.raises(StoreFull):
        await publisher.publish(weights(2), step=2)
    full = False
    assert (await publisher.publish(weights(2), step=2)).number == 3
    assert [v.number for v in store.committed("run")] == [1, 3]
    assert len(list((tmp_path / "store" / "run").iterdir())) == 2


async def test_a_service_that_restarts_costs_no_version(
    service: Any,
    publisher: Publisher,
    client: WeightClient,
    weights: Weights,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await publisher.publish(weights(1), step=1)
    await service.stop()
    publishing = asyncio.create_task(publisher.publish(weights(2), step=2))
    async with asyncio.timeout(5):
        while "version 2 is not announced yet" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert not publishing.done()
    await service.start()
    assert (await publishing).number == 2
    listed = (await client.list_versions(timeout_s=5)).versions
    assert [v.version.number for v in listed] == [1, 2]


async def test_a_service_that_stays_away_is_an_error_within_the_time_given(
    service: Any, publisher: Publisher, weights: Weights
) -> None:
    await service.stop()
    with pytest.raises(ServiceError) as caught:
        await publisher.publish(weights(1), step=1, timeout_s=0.3)
    assert caught.value.retryable
    await service.start()
    assert (await publisher.publish(weights(1), step=1)).number == 2


async def test_what_was_committed_but_never_announced_does_not_stay(
    config: WeightSyncConfig,
    publisher: Publisher,
    weights: Weights,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def away(*_: Any, **__: Any) -> None:
        raise Unavailable("the service is away")

    with monkeypatch.context() as patch:
        patch.setattr(WeightClient, "announce", away)
        with pytest.raises(Unavailable):
            await publisher.publish(weights(1), step=1, timeout_s=0.3)
    store = publisher_store(config)
    assert [v.number for v in store.committed("run")] == [1]
    await publisher.publish(weights(1), step=1)
    assert [v.number for v in store.committed("run")] == [2]


async def test_what_is_no_name_for_a_run_is_refused_here(channel: Channel) -> None:
    with pytest.raises(ManifestError, match="run: expected"):
        await Publisher.acquire(channel, run="a/b")
    with pytest.raises(ValueError, match="keep_latest must be at least 1"):
        await Publisher.acquire(channel, run="a", keep_latest=0)


async def test_prunes_what_no_engine_needs(
    config: WeightSyncConfig, channel: Channel, weights: Weights
) -> None:
    store = publisher_store(config)
    publisher = await Publisher.acquire(channel, run="run", keep_latest=2)
    for step in range(5):
        await publisher.publish(weights(step), step=step)
    assert [v.number for v in store.committed("run")] == [4, 5]
    # A resumed publisher clears what the old one wrote but never announced.
    stray = store.begin("run", 6, 1)
    stray.write("model.safetensors", [b"torn"])
    resumed = await Publisher.acquire(channel, run="run", keep_latest=1)
    assert (await resumed.publish(weights(9), step=9)).number == 7
    assert [path.name for path in (store.root / "run").iterdir()] == ["0000000007-0002"]


async def test_prunes_nothing_just_after_a_restart_of_the_service(
    config: WeightSyncConfig, service: Any, publisher: Publisher, weights: Weights
) -> None:
    # Receivers may be at work that have not reported to this life of the service yet.
    for step in range(5):
        await publisher.publish(weights(step), step=step)
        if step == 1:
            await service.stop()
            await service.start()
    assert [v.number for v in publisher_store(config).committed("run")] == [1, 2, 3, 4, 5]


async def test_keeps_what_an_engine_is_being_brought_to(
    config: WeightSyncConfig, channel: Channel, client: WeightClient, weights: Weights
) -> None:
    publisher = await Publisher.acquire(channel, run="run", keep_latest=1)
    await client.register_node(
        node_id="n",
        host="h",
        rollout_target="",
        engines=[EngineEndpoint("http://e")],
        lease_s=0,
        timeout_s=5,
    )
    report = EngineReport(url="http://e", phase=Phase.PREPARING, version=1, target_version=2)
    await client.report_engines("h", [report], timeout_s=5)
    for step in range(4):
        await publisher.publish(weights(step), step=step)
    assert [v.number for v in publisher_store(config).committed("run")] == [2, 4]


@pytest.mark.parametrize("at", [2, 8, -1])
async def test_a_publisher_process_that_is_killed_is_replaced_by_the_next(
    kill_publisher: Any, channel: Channel, client: WeightClient, weights: Weights, at: int
) -> None:
    await kill_publisher("dense", version=1, at=at)
    assert list((await client.list_versions("run", timeout_s=5)).versions) == []
    publisher = await Publisher.acquire(channel, run="run")
    version = await publisher.publish(weights(1), step=1)
    assert version.incarnation == 2
    listed = (await client.list_versions(timeout_s=5)).versions
    assert [v.version for v in listed] == [version]
    # Whatever the dead one left is not of the number now announced.
    assert version.number == 2
