"""What a publisher of deltas announces, keeps and forgets."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from service_kit.channel import Channel
from service_kit.errors import Unavailable
from weight_sync import FolderStore, Manifest, PublishConfig, Publisher, WeightClient
from weight_sync.config import WeightSyncConfig
from weight_sync.model_files import tensors_in
from weight_sync.shadow import ShadowFolder
from weight_sync.snapshot import take_snapshot
from weight_sync.stores.folder import path_of

Weights = Callable[[int], dict[str, Any]]
DELTAS = PublishConfig(codec="ulp-gap", anchor_every=3)


@pytest.fixture
async def publisher(channel: Channel) -> Publisher:
    return await Publisher.acquire(channel, run="run", config=DELTAS, keep_latest=1)


async def bases(client: WeightClient) -> list[tuple[int, int]]:
    listed = await client.list_versions("run", timeout_s=5)
    return [(v.version.number, v.base) for v in listed.versions]


async def assert_newest_is(
    client: WeightClient, expected: dict[str, Any], folder: Path, base_model: Path
) -> None:
    """Rebuild the newest version from the store, as a receiver that joins now."""
    versions = (await client.list_versions("run", timeout_s=5)).versions
    shadows = ShadowFolder(folder)
    shadow = shadows.prepare(versions[-1], base_model, versions)
    found = {t.name: bytes(t.data) for t in tensors_in(shadow.folder)}
    assert found == {name: array.tobytes() for name, array in expected.items()}
    shadows.close()


async def test_versions_go_out_as_deltas_between_anchors(
    publisher: Publisher, client: WeightClient, weights: Weights, tmp_path: Path, base_model: Path
) -> None:
    for step in range(5):
        await publisher.publish(weights(step), step=step)
        await assert_newest_is(client, weights(step), tmp_path / "shadow", base_model)
    assert await bases(client) == [(1, 0), (2, 1), (3, 2), (4, 0), (5, 4)]
    assert publisher.last is not None
    assert publisher.last.base == 4


async def test_a_delta_s_manifest_names_base_codec_and_every_tensor(
    publisher: Publisher, client: WeightClient, weights: Weights
) -> None:
    for step in (1, 2):
        await publisher.publish(weights(step), step=step)
    first, second = (await client.list_versions("run", timeout_s=5)).versions
    manifest = Manifest.from_bytes(path_of(second.manifest_uri).read_bytes())
    assert (manifest.base, manifest.codec) == (1, "ulp-gap")
    assert [t.name for t in manifest.tensors] == sorted(weights(1))
    (payload,) = manifest.payloads
    assert path_of(second.manifest_uri).parent / payload.name in list(
        path_of(second.manifest_uri).parent.glob("delta-*.bin")
    )
    assert payload.size_bytes == second.payload_bytes < first.payload_bytes / 2


async def test_a_resumed_run_publishes_an_anchor_first(
    channel: Channel, publisher: Publisher, client: WeightClient, weights: Weights
) -> None:
    for step in (1, 2):
        await publisher.publish(weights(step), step=step)
    resumed = await Publisher.acquire(channel, run="run", config=DELTAS)
    for step in (2, 3):
        await resumed.publish(weights(step), step=step, parent=1)
    assert await bases(client) == [(1, 0), (2, 1), (3, 0), (4, 3)]


async def test_only_what_was_announced_is_a_base(
    publisher: Publisher,
    client: WeightClient,
    weights: Weights,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    base_model: Path,
) -> None:
    await publisher.publish(weights(1), step=1)

    async def away(*_: Any, **__: Any) -> None:
        raise Unavailable("the service is away")

    with monkeypatch.context() as patch:
        patch.setattr(WeightClient, "announce", away)
        with pytest.raises(Unavailable):
            await publisher.publish(weights(2), step=2, timeout_s=0.3)
    await publisher.publish(weights(3), step=3)
    assert await bases(client) == [(1, 0), (3, 1)]
    await assert_newest_is(client, weights(3), tmp_path / "shadow", base_model)


async def test_a_publisher_cancelled_while_it_copies_goes_on_with_an_anchor(
    publisher: Publisher, client: WeightClient, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer may change its tensors then, while a thread still copies them."""
    await publisher.publish(weights(1), step=1)
    copying, go_on = threading.Event(), threading.Event()

    def slowly(*arguments: Any, **named: Any) -> Any:
        copying.set()
        go_on.wait(10)
        return take_snapshot(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr("weight_sync.publisher.take_snapshot", slowly)
        publishing = asyncio.create_task(publisher.publish(weights(2), step=2))
        await asyncio.to_thread(copying.wait, 10)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
    await publisher.publish(weights(3), step=3)
    go_on.set()
    await publisher.publish(weights(4), step=4)
    assert await bases(client) == [(1, 0), (2, 1), (3, 0), (4, 3)]


async def test_the_trainer_may_change_its_tensors_after_publishing(
    publisher: Publisher, client: WeightClient, weights: Weights, tmp_path: Path, base_model: Path
) -> None:
    own = weights(1)
    for step in (1, 2, 3):
        for name, array in weights(step).items():
            own[name][...] = array
        await publisher.publish(own, step=step)
    assert await bases(client) == [(1, 0), (2, 1), (3, 2)]
    await assert_newest_is(client, weights(3), tmp_path / "shadow", base_model)


async def test_other_tensors_or_all_of_them_changed_need_an_anchor(
    publisher: Publisher, client: WeightClient, weights: Weights
) -> None:
    await publisher.publish(weights(1), step=1)
    grown = weights(2) | {"new": np.ones(3, np.float32)}
    await publisher.publish(grown, step=2)
    await publisher.publish({n: a + np.float32(1) for n, a in grown.items()}, step=3)
    assert await bases(client) == [(1, 0), (2, 0), (3, 0)]


async def test_pruning_keeps_the_anchor_and_the_deltas_since(
    config: WeightSyncConfig, publisher: Publisher, weights: Weights
) -> None:
    store = FolderStore(config.store_folder)
    kept = []
    for step in range(5):
        await publisher.publish(weights(step), step=step)
        kept.append([v.number for v in store.committed("run")])
    assert kept == [[1], [1, 2], [1, 2, 3], [4], [4, 5]]


@pytest.mark.parametrize("at", [2, 9, -1])
async def test_a_process_killed_in_a_delta_is_followed_by_an_anchor(
    kill_publisher: Any,
    channel: Channel,
    client: WeightClient,
    weights: Weights,
    tmp_path: Path,
    base_model: Path,
    at: int,
) -> None:
    await kill_publisher("ulp-gap", version=2, at=at)
    assert await bases(client) == [(1, 0)]
    resumed = await Publisher.acquire(channel, run="run", config=DELTAS)
    for step in (1, 2):
        await resumed.publish(weights(step), step=step, parent=1)
    # Number 2 is the dead one's, torn or committed but never announced.
    assert await bases(client) == [(1, 0), (3, 0), (4, 3)]
    await assert_newest_is(client, weights(2), tmp_path / "shadow", base_model)
