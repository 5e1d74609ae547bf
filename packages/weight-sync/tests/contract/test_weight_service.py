import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from service_kit.channel import Channel
from service_kit.errors import Reason, ServiceError
from tailrace.weight_sync.v1 import weight_service_pb2 as pb
from tailrace.weight_sync.v1 import weight_service_pb2_grpc as pb_grpc
from weight_sync import (
    AnnouncedVersion,
    EngineEndpoint,
    EngineReport,
    FolderStore,
    TensorEntry,
    WeightClient,
)
from weight_sync.core.manifest import build_manifest, digest
from weight_sync.core.receiver import Phase


def committed(
    store: FolderStore, number: int, incarnation: int = 1, *, run: str = "run", base: int = 0
) -> AnnouncedVersion:
    """Commit a version of one tensor, and return what its publisher would announce."""
    bits = b"%d" % number
    publication = store.begin(run, number, incarnation)
    payload = publication.write("model.safetensors", [bits])
    manifest = build_manifest(
        run=run,
        incarnation=incarnation,
        number=number,
        step=number,
        parent=0,
        base=base,
        codec="dense",
        tensors=[TensorEntry("t", "U8", (len(bits),), digest(bits))],
        payloads=[payload],
    )
    return AnnouncedVersion(
        version=manifest.version,
        manifest_uri=publication.commit(manifest),
        payload_bytes=payload.size_bytes,
        base=base,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


async def acquire(client: WeightClient, run: str = "run", known_number: int = 0) -> int:
    grant = await client.acquire_publisher(
        run, holder="test", known_number=known_number, timeout_s=5
    )
    return grant.incarnation


async def failure(call: Any) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await call
    return caught.value


async def test_tells_a_publisher_where_to_write_and_from_which_number(
    client: WeightClient, store: FolderStore
) -> None:
    grant = await client.acquire_publisher("run", holder="h", known_number=7, timeout_s=5)
    assert (grant.incarnation, grant.last_number, grant.store_uri) == (1, 7, store.uri)
    again = await client.acquire_publisher("run", holder="h", known_number=0, timeout_s=5)
    assert (again.incarnation, again.last_number) == (2, 7)


async def test_lists_what_was_announced(client: WeightClient, store: FolderStore) -> None:
    await acquire(client)
    made = [committed(store, 1), committed(store, 2)]
    for announced in made:
        await client.announce(announced, timeout_s=5)
    listed = await client.list_versions(timeout_s=5)
    assert (list(listed.versions), listed.incarnation) == (made, 1)
    assert list((await client.list_versions("other", timeout_s=5)).versions) == []


async def test_a_long_list_is_cut_at_its_old_end(client: WeightClient, store: FolderStore) -> None:
    await acquire(client)
    for number in range(1, 13):
        await client.announce(committed(store, number), timeout_s=5)
    listed = (await client.list_versions(timeout_s=5)).versions
    assert [v.version.number for v in listed] == list(range(3, 13))


async def test_an_older_incarnation_is_refused_as_fenced(
    client: WeightClient, store: FolderStore
) -> None:
    await acquire(client)
    await acquire(client)
    error = await failure(client.announce(committed(store, 1, 1), timeout_s=5))
    assert error.reason is Reason.FENCED
    assert not error.retryable
    assert list((await client.list_versions(timeout_s=5)).versions) == []


async def test_a_fenced_publisher_hears_it_even_if_its_version_was_swept(
    client: WeightClient, store: FolderStore
) -> None:
    await acquire(client)
    swept = committed(store, 1, 1)
    await acquire(client)
    for version in store.committed("run"):
        store.remove(version)
    error = await failure(client.announce(swept, timeout_s=5))
    assert error.reason is Reason.FENCED


async def test_refusals_have_reasons(client: WeightClient, store: FolderStore) -> None:
    await acquire(client)
    first = committed(store, 3)
    await client.announce(first, timeout_s=5)
    await client.announce(first, timeout_s=5)  # the same again is fine
    late = await failure(client.announce(committed(store, 2), timeout_s=5))
    assert late.reason is Reason.ALREADY_EXISTS
    delta = await failure(client.announce(committed(store, 5, base=2), timeout_s=5))
    assert delta.reason is Reason.STALE_BASE_VERSION
    named = await failure(acquire(client, run="../up"))
    assert named.reason is Reason.INVALID_ARGUMENT
    assert "run: expected 1 to 100 letters" in named.message


async def test_an_empty_announcement_is_refused(channel: Channel) -> None:
    stub = pb_grpc.WeightServiceStub(channel)
    error = await failure(stub.Announce(pb.AnnounceRequest(), timeout=5))
    assert error.reason is Reason.INVALID_ARGUMENT


async def test_a_version_that_is_not_in_the_store_is_not_announced(
    client: WeightClient, store: FolderStore
) -> None:
    await acquire(client)
    first, second = committed(store, 1), committed(store, 2)
    for version in store.committed("run"):
        if version.number == 2:
            store.remove(version)
    gone = await failure(client.announce(second, timeout_s=5))
    assert gone.reason is Reason.NOT_FOUND
    swapped = AnnouncedVersion(
        version=second.version, manifest_uri=first.manifest_uri, payload_bytes=1
    )
    wrong = await failure(client.announce(swapped, timeout_s=5))
    assert wrong.reason is Reason.INVALID_ARGUMENT
    foreign = AnnouncedVersion(
        version=first.version, manifest_uri="s3://bucket/manifest.json", payload_bytes=1
    )
    assert (await failure(client.announce(foreign, timeout_s=5))).reason is Reason.INVALID_ARGUMENT


async def take(stream: AsyncIterator[AnnouncedVersion], count: int) -> list[int]:
    async with asyncio.timeout(5):
        return [(await anext(stream)).version.number for _ in range(count)]


async def test_a_watcher_gets_the_newest_and_then_each_that_follows(
    client: WeightClient, store: FolderStore
) -> None:
    await acquire(client)
    for number in (1, 2):
        await client.announce(committed(store, number), timeout_s=5)
    async with aclosing(client.watch_versions(idle_timeout_s=5)) as stream:
        assert await take(stream, 1) == [2]
        for number in (3, 4):
            await client.announce(committed(store, number), timeout_s=5)
        assert await take(stream, 2) == [3, 4]
    async with aclosing(client.watch_versions(after_number=1, idle_timeout_s=5)) as stream:
        assert await take(stream, 3) == [2, 3, 4]


async def test_a_watcher_of_no_run_moves_on_to_the_run_acquired_last(
    client: WeightClient, store: FolderStore
) -> None:
    await acquire(client, "one")
    await client.announce(committed(store, 1, run="one"), timeout_s=5)
    async with (
        aclosing(client.watch_versions(idle_timeout_s=5)) as any_run,
        aclosing(client.watch_versions("one", idle_timeout_s=5)) as one,
    ):
        assert await take(any_run, 1) == await take(one, 1) == [1]
        await acquire(client, "two")
        await client.announce(committed(store, 2, run="two"), timeout_s=5)
        assert await take(any_run, 1) == [2]
        await acquire(client, "one")
        await client.announce(committed(store, 3, 2, run="one"), timeout_s=5)
        assert await take(one, 1) == await take(any_run, 1) == [3]


async def test_a_silent_stream_has_heartbeats(channel: Channel) -> None:
    stub = pb_grpc.WeightServiceStub(channel)
    call = stub.WatchVersions(pb.WatchVersionsRequest())
    async with asyncio.timeout(5):
        events = [(await anext(aiter(call))).WhichOneof("event") for _ in range(2)]
    call.cancel()
    assert events == ["heartbeat", "heartbeat"]


async def test_the_record_survives_the_service(
    service: Any, client: WeightClient, store: FolderStore
) -> None:
    await acquire(client)
    await client.announce(committed(store, 1), timeout_s=5)
    await service.stop()
    await service.start()
    listed = await client.list_versions(timeout_s=5)
    assert [v.version.number for v in listed.versions] == [1]
    await client.announce(committed(store, 2), timeout_s=5)
    assert await acquire(client) == 2
    assert (await failure(client.announce(committed(store, 3), timeout_s=5))).reason is (
        Reason.FENCED
    )


async def register(client: WeightClient, *urls: str, host: str = "host") -> float:
    return await client.register_node(
        node_id="node",
        host=host,
        rollout_target="127.0.0.1:7104",
        engines=[EngineEndpoint(url) for url in urls],
        lease_s=20,
        timeout_s=5,
    )


async def test_shows_nodes_engines_and_how_far_they_are_behind(
    client: WeightClient, store: FolderStore
) -> None:
    assert await register(client, "http://a", "http://b") == 20
    await acquire(client)
    for number in (1, 2, 3):
        await client.announce(committed(store, number), timeout_s=5)
    report = EngineReport(
        url="http://a",
        kind="embedded",
        phase=Phase.PREPARING,
        version=1,
        target_version=3,
        prepare_s=0.5,
        activate_s=0.25,
        pause_s=0.125,
        payload_bytes=9,
        error="earlier trouble",
    )
    await client.report_engines("host", [report], timeout_s=5)
    found = await client.list_nodes(timeout_s=5)
    assert found.newest_version == 3
    (node,) = found.nodes
    assert (node.node_id, node.host, node.rollout_target) == ("node", "host", "127.0.0.1:7104")
    assert 0 < node.lease_left_s <= 20
    first, second = node.engines
    assert first == replace(report, versions_behind=2)
    assert (second.url, second.phase, second.versions_behind) == ("http://b", Phase.UNKNOWN, 3)


async def test_a_node_without_a_name_is_refused(client: WeightClient) -> None:
    error = await failure(register(client, "http://a", host=""))
    assert error.reason is Reason.INVALID_ARGUMENT
    assert "name the machine" in error.message


async def report(client: WeightClient, **versions: int) -> None:
    reports = [
        EngineReport(url=f"http://{name}", phase=Phase.SERVING, version=number)
        for name, number in versions.items()
    ]
    await client.report_engines("host", reports, timeout_s=5)


async def test_waits_until_every_engine_holds_a_version(client: WeightClient) -> None:
    await register(client, "http://a", "http://b")
    waiting = asyncio.create_task(client.await_version(4, timeout_s=5))
    one = asyncio.create_task(client.await_version(4, engines=1, timeout_s=5))
    await report(client, a=3, b=3)
    await report(client, a=4, b=3)
    assert (await one).engines == 1
    assert not waiting.done()
    await report(client, a=4, b=5)
    found = await waiting
    assert (found.engines, found.oldest_version) == (2, 4)


async def test_says_how_many_hold_it_when_time_is_up(client: WeightClient) -> None:
    found = await client.await_version(1, timeout_s=0.3)
    assert found.engines == 0  # no engine at all is not "every engine"
    await register(client, "http://a", "http://b")
    await report(client, a=2)
    found = await client.await_version(2, timeout_s=0.3)
    assert (found.engines, found.oldest_version) == (1, 0)


async def test_draining_ends_streams_and_waits(service: Any, client: WeightClient) -> None:
    async def watch() -> int:
        return len([v async for v in client.watch_versions(idle_timeout_s=30)])

    watching = asyncio.create_task(watch())
    waiting = asyncio.create_task(client.await_version(1, timeout_s=30))
    await client.list_nodes(timeout_s=5)
    async with asyncio.timeout(5):
        await service.stop()
        assert await watching == 0
        assert (await waiting).engines == 0
    await service.start()


async def test_announcing_says_which_versions_engines_need(
    client: WeightClient, store: FolderStore
) -> None:
    await register(client, "http://a", "http://b")
    await acquire(client)
    await report(client, a=1)
    moving = EngineReport(url="http://b", phase=Phase.READY, version=2, target_version=3)
    await client.report_engines("host", [moving], timeout_s=5)
    needed = await client.announce(committed(store, 4), timeout_s=5)
    assert (needed.held, needed.targets) == ((2,), (3,))
    assert needed.settled


async def test_a_restarted_service_does_not_know_yet_what_engines_need(
    service: Any, client: WeightClient, store: FolderStore
) -> None:
    await acquire(client)
    await service.stop()
    await service.start()
    needed = await client.announce(committed(store, 1), timeout_s=5)
    assert not needed.settled
