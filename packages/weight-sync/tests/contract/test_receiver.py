"""Real service, real files, real HTTP; engines that tear, lie, hang and restart.

Each test runs with whole versions, and with deltas between anchors.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from service_kit.channel import Channel, ChannelConfig, open_channel
from service_kit.errors import Unauthenticated, Unavailable
from weight_sync import (
    EngineEndpoint,
    EngineReport,
    PolicyVersion,
    PublishConfig,
    Publisher,
    WeightClient,
)
from weight_sync.config import ReceiverConfig, StaticEngine, WeightSyncConfig
from weight_sync.core.manifest import Manifest
from weight_sync.core.receiver import Phase
from weight_sync.stores import FolderStore
from weight_sync.stores.folder import path_of
from weight_sync.testing import FakeEngine, Fault, root_of

Weights = Callable[[int], dict[str, Any]]


def receiving(config: WeightSyncConfig, *engines: FakeEngine, **changes: Any) -> WeightSyncConfig:
    """Return the config of a service with a quick receiver for these engines."""
    receiver = ReceiverConfig(
        host="host",
        engines=tuple(StaticEngine(url=engine.url) for engine in engines),
        poll_interval_s=0.02,
        report_interval_s=0.05,
        retry_s=0.02,
        **changes,
    )
    return config.model_copy(update={"receiver": receiver})


class Stack:
    """A service with a receiver, a publisher, and what they published."""

    def __init__(self, service: Any, channel: Channel, publisher: Publisher) -> None:
        self.service = service
        self.client = WeightClient(channel)
        self.publisher = publisher
        self.roots: dict[str, str] = {}

    async def publish(self, weights: dict[str, Any]) -> PolicyVersion:
        version = await self.publisher.publish(weights, step=len(self.roots) + 1)
        self.roots[version.label] = root_of({n: a.tobytes() for n, a in weights.items()})
        return version

    async def reached(self, version: PolicyVersion, engines: int = 0) -> None:
        found = await self.client.await_version(version.number, engines=engines, timeout_s=10)
        assert found.engines >= max(engines, 1), await self.reports()

    async def reports(self) -> list[EngineReport]:
        nodes = (await self.client.list_nodes(timeout_s=5)).nodes
        return [engine for node in nodes for engine in node.engines]

    async def until(self, holds: Callable[[EngineReport], bool]) -> EngineReport:
        reports = await self.until_all(lambda reports: any(holds(r) for r in reports))
        return next(report for report in reports if holds(report))

    async def until_all(self, holds: Callable[[list[EngineReport]], bool]) -> list[EngineReport]:
        ends_s = time.monotonic() + 10
        while time.monotonic() < ends_s:
            reports = await self.reports()
            if holds(reports):
                return reports
            await asyncio.sleep(0.01)
        raise AssertionError(await self.reports())

    async def asks_for_an_anchor(self) -> None:
        """Wait until the host's receiver is known to be stuck."""
        async with asyncio.timeout(10):
            while await self.client.plan_version("run", timeout_s=5) != ("host",):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def assert_truthful(self, *engines: FakeEngine) -> None:
        """Whatever an engine ever generated with was what its label said."""
        for engine in engines:
            assert engine.unpaused_loads == 0
            for label, root in engine.served:
                assert label == "default" or root == self.roots[label]


@pytest.fixture(autouse=True, params=["dense", "ulp-gap"])
def codec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the publishers of `opened` send."""
    monkeypatch.setattr(opened, "publish", PublishConfig(codec=request.param, anchor_every=4))
    return str(request.param)


@pytest.fixture
async def stack(
    config: WeightSyncConfig, run_service: Any, engine: FakeEngine
) -> AsyncIterator[Stack]:
    async with opened(run_service, receiving(config, engine)) as stack:
        yield stack


class opened:  # noqa: N801 -- used as a context manager
    publish = PublishConfig()

    def __init__(self, run_service: Any, config: WeightSyncConfig) -> None:
        self._running = run_service(config)

    async def __aenter__(self) -> Stack:
        service = await self._running.__aenter__()
        self._channel = open_channel(ChannelConfig(target=service.address))
        publisher = await Publisher.acquire(self._channel, run="run", config=self.publish)
        return Stack(service, self._channel, publisher)

    async def __aexit__(self, *error: Any) -> None:
        await self._channel.close()
        await self._running.__aexit__(*error)


async def test_an_engine_is_brought_to_each_published_version(
    stack: Stack, engine: FakeEngine, weights: Weights, codec: str
) -> None:
    for seed in (1, 2, 3):
        version = await stack.publish(weights(seed))
        await stack.reached(version)
        assert engine.label == version.label
        assert engine.root() == stack.roots[version.label]
        assert not engine.paused
    stack.assert_truthful(engine)
    bases = [v.base for v in (await stack.client.list_versions(timeout_s=5)).versions]
    assert bases == ([0, 0, 0] if codec == "dense" else [0, 1, 2])
    (report,) = await stack.reports()
    assert (report.phase, report.version, report.versions_behind) == (Phase.SERVING, 3, 0)
    assert report.prepare_s > 0
    assert report.activate_s >= report.pause_s > 0
    assert report.payload_bytes > 0
    assert report.error == ""


async def test_the_calls_are_sglang_s_in_their_order(
    stack: Stack, engine: FakeEngine, weights: Weights
) -> None:
    await stack.reached(await stack.publish(weights(1)))
    paths = [path for path, _ in engine.calls]
    assert paths == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/weights_checker",
        "/continue_generation",
    ]
    assert engine.calls[0][1] == {"mode": "in_place"}
    update = dict(engine.calls[1][1])
    folder = Path(update.pop("model_path"))
    assert update == {"weight_version": "1", "flush_cache": False, "abort_all_requests": False}
    assert (folder / "config.json").read_text() == "{}"


async def test_recomputing_the_cache_retracts_and_flushes(
    config: WeightSyncConfig, run_service: Any, engine: FakeEngine, weights: Weights
) -> None:
    changed = receiving(config, engine, kv_policy="recompute")
    async with opened(run_service, changed) as stack:
        await stack.reached(await stack.publish(weights(1)))
    assert engine.calls[0][1] == {"mode": "retract"}
    assert engine.calls[1][1]["flush_cache"] is True


@pytest.mark.parametrize("fault", list(Fault))
async def test_no_fault_of_a_load_makes_an_engine_lie(
    config: WeightSyncConfig,
    run_service: Any,
    engine: FakeEngine,
    weights: Weights,
    fault: Fault,
) -> None:
    changed = receiving(config, engine, load_timeout_s=0.3)
    async with opened(run_service, changed) as stack:
        await stack.reached(await stack.publish(weights(1)))
        engine.faults.append(fault)
        loads = len([path for path, _ in engine.calls if path.startswith("/update")])
        version = await stack.publish(weights(2))
        await stack.reached(version)
        assert engine.root() == stack.roots[version.label]
        assert len([p for p, _ in engine.calls if p.startswith("/update")]) == loads + 2
        stack.assert_truthful(engine)


async def test_a_torn_engine_is_poisoned_and_stays_paused(
    config: WeightSyncConfig, run_service: Any, engine: FakeEngine, weights: Weights
) -> None:
    changed = receiving(config, engine).receiver.model_copy(update={"retry_s": 30.0})
    async with opened(run_service, config.model_copy(update={"receiver": changed})) as stack:
        await stack.reached(await stack.publish(weights(1)))
        engine.faults.append(Fault.TEAR_SILENTLY)
        await stack.publish(weights(2))
        report = await stack.until(lambda r: r.phase is Phase.POISONED)
        assert report.version == 0
        assert "expected checksum" in report.error
        assert engine.paused
        assert engine.label == "2"  # it says so itself, but generates nothing
        stack.assert_truthful(engine)


async def test_a_pause_that_fails_is_tried_again(
    stack: Stack, engine: FakeEngine, weights: Weights
) -> None:
    engine.pause_faults.append(Fault.REFUSE)
    await stack.reached(await stack.publish(weights(1)))
    assert engine.root() == stack.roots["1"]


async def test_an_engine_that_restarts_is_brought_up_to_date(
    stack: Stack, engine: FakeEngine, weights: Weights
) -> None:
    version = await stack.publish(weights(1))
    await stack.reached(version)
    engine.restart()
    assert engine.label == "default"
    await stack.until(lambda r: r.version == 0 or engine.label == "1")
    await stack.until(lambda r: r.version == 1 and engine.label == "1")
    assert engine.root() == stack.roots["1"]


async def test_an_engine_that_does_not_answer_reports_nothing_and_comes_back(
    stack: Stack, engine: FakeEngine, weights: Weights
) -> None:
    await stack.reached(await stack.publish(weights(1)))
    await engine.stop()
    gone = await stack.until(lambda r: r.phase is Phase.UNKNOWN)
    assert (gone.version, gone.error) == (0, "the engine does not answer")
    engine.restart()
    version = await stack.publish(weights(2))
    await engine.start()
    await stack.reached(version)
    assert engine.root() == stack.roots["2"]


async def test_another_hand_on_the_weights_is_noticed(
    stack: Stack, engine: FakeEngine, weights: Weights
) -> None:
    version = await stack.publish(weights(1))
    await stack.reached(version)
    engine.label = "somebody else's"
    await stack.until(lambda r: r.version == 1 and engine.label == "1")


async def test_intermediate_versions_are_skipped(
    config: WeightSyncConfig, run_service: Any, engine: FakeEngine, weights: Weights
) -> None:
    async with opened(run_service, receiving(config, engine)) as stack:
        await engine.stop()
        for seed in range(1, 6):
            version = await stack.publish(weights(seed))
        await engine.start()
        await stack.reached(version)
        labels = [body["weight_version"] for path, body in engine.calls if "update" in path]
        assert labels == ["5"]


async def test_engines_switch_one_after_the_other(
    config: WeightSyncConfig,
    run_service: Any,
    engine: FakeEngine,
    second_engine: FakeEngine,
    weights: Weights,
) -> None:
    both_paused: list[bool] = []
    engines = (engine, second_engine)

    class Watching(list[tuple[str, dict[str, Any]]]):
        def append(self, call: tuple[str, dict[str, Any]]) -> None:
            super().append(call)
            both_paused.append(engine.paused and second_engine.paused)

    for each in engines:
        each.calls = Watching()
    async with opened(run_service, receiving(config, *engines)) as stack:
        for seed in (1, 2):
            await stack.reached(await stack.publish(weights(seed)), engines=2)
        assert [each.root() for each in engines] == [stack.roots["2"]] * 2
        assert len(both_paused) == 16
        assert not any(both_paused)
        # One shadow for both.
        folders = {
            body["model_path"] for each in engines for p, body in each.calls if "update" in p
        }
        assert len(folders) == 2
        stack.assert_truthful(*engines)


async def test_one_bad_engine_does_not_hold_up_the_other(
    config: WeightSyncConfig,
    run_service: Any,
    engine: FakeEngine,
    second_engine: FakeEngine,
    weights: Weights,
) -> None:
    engine.faults.extend([Fault.TEAR] * 1000)
    async with opened(run_service, receiving(config, engine, second_engine)) as stack:
        for seed in (1, 2, 3):
            await stack.reached(await stack.publish(weights(seed)), engines=1)
        bad = await stack.until(lambda r: r.url == engine.url and r.phase is Phase.POISONED)
        assert "torn" in bad.error
        assert second_engine.label == "3"
        assert engine.served == []


async def test_engines_of_registered_nodes_join_late_and_leave(
    config: WeightSyncConfig,
    run_service: Any,
    engine: FakeEngine,
    second_engine: FakeEngine,
    weights: Weights,
) -> None:
    async with opened(run_service, receiving(config, engine)) as stack:
        version = await stack.publish(weights(1))
        await stack.reached(version)

        async def register(host: str, lease_s: float) -> None:
            await stack.client.register_node(
                node_id=f"node@{host}",
                host=host,
                rollout_target="127.0.0.1:7104",
                engines=[EngineEndpoint(second_engine.url)],
                lease_s=lease_s,
                timeout_s=5,
            )

        await register("another host", 1)
        await stack.until(lambda r: r.url == second_engine.url)
        assert second_engine.calls == []
        await register("host", 0.5)
        await stack.reached(version, engines=2)
        assert second_engine.root() == stack.roots["1"]
        # Its lease ends: nobody touches it any more.
        await stack.until_all(lambda reports: len(reports) == 1)
        await stack.reached(await stack.publish(weights(2)), engines=1)
        assert engine.label == "2"
        assert second_engine.label == "1"


async def test_a_restarted_receiver_finds_its_engine_without_loading_it_again(
    stack: Stack, engine: FakeEngine, weights: Weights
) -> None:
    version = await stack.publish(weights(1))
    await stack.reached(version)
    await stack.service.stop()
    engine.calls.clear()
    engine.paused = True  # as a receiver leaves it that was killed before it could continue
    await stack.service.start()
    await stack.reached(version)
    assert [path for path, _ in engine.calls] == ["/weights_checker", "/continue_generation"]
    assert not engine.paused


async def test_a_receiver_that_is_stopped_finishes_the_activation_it_has_begun(
    stack: Stack, engine: FakeEngine, weights: Weights
) -> None:
    engine.load_s = 0.2
    await stack.publish(weights(1))
    async with asyncio.timeout(10):
        while not engine.paused:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    await stack.service.stop()
    assert engine.served == [("1", stack.roots["1"])]
    await stack.service.start()


async def test_a_restarted_receiver_trusts_no_label(
    stack: Stack, engine: FakeEngine, weights: Weights
) -> None:
    version = await stack.publish(weights(1))
    await stack.reached(version)
    await stack.service.stop()
    engine.tensors |= {"norm": bytes(32)}  # torn by a receiver that died
    engine.paused = True
    await stack.service.start()
    await stack.reached(version)
    assert engine.root() == stack.roots["1"]
    stack.assert_truthful(engine)


async def test_the_versions_go_on_across_a_restart_of_the_service(
    stack: Stack, engine: FakeEngine, weights: Weights
) -> None:
    for seed in (1, 2):
        await stack.reached(await stack.publish(weights(seed)))
        await stack.service.stop()
        await stack.service.start()
    version = await stack.publish(weights(3))
    await stack.reached(version)
    assert version.number == 3
    stack.assert_truthful(engine)


async def test_a_payload_that_cannot_be_verified_never_reaches_an_engine(
    config: WeightSyncConfig, run_service: Any, engine: FakeEngine, weights: Weights, codec: str
) -> None:
    async with opened(run_service, receiving(config, engine)) as stack:
        await stack.reached(await stack.publish(weights(1)))
        await engine.stop()
        await stack.until(lambda r: r.phase is Phase.UNKNOWN)
        await stack.publish(weights(2))
        announced = (await stack.client.list_versions(timeout_s=5)).versions[-1]
        folder = path_of(announced.manifest_uri).parent
        (payload,) = (path for path in folder.iterdir() if path.suffix != ".json")
        assert (payload.suffix == ".bin") == (codec == "ulp-gap")
        data = bytearray(payload.read_bytes())
        data[-1] ^= 1
        payload.chmod(0o644)
        payload.write_bytes(data)
        engine.calls.clear()
        await engine.start()
        report = await stack.until(lambda r: "expected checksum" in r.error)
        assert report.version == 0
        await stack.asks_for_an_anchor()
        assert engine.calls == []
        # What builds on it could not be made either: the next version is an anchor, and no other.
        for seed in (3, 4):
            version = await stack.publish(weights(seed))
            await stack.reached(version)
            assert engine.root() == stack.roots[version.label]
        bases = [v.base for v in (await stack.client.list_versions(timeout_s=5)).versions]
        assert bases == ([0, 0, 0, 0] if codec == "dense" else [0, 1, 0, 3])


async def test_a_payload_that_is_seen_late_costs_no_anchor(
    config: WeightSyncConfig, run_service: Any, engine: FakeEngine, weights: Weights, codec: str
) -> None:
    """As on a file system whose clients see a new file some time after the manifest."""
    receiver = receiving(config, engine).receiver.model_copy(update={"retry_s": 0.3})
    async with opened(run_service, config.model_copy(update={"receiver": receiver})) as stack:
        await stack.reached(await stack.publish(weights(1)))
        hidden: list[Path] = []

        class Late:
            def open(self, uri: str, manifest: Manifest) -> None:
                payload = path_of(uri).parent / manifest.payloads[0].name
                hidden.append(payload.rename(payload.with_suffix(".hidden")))

            def start(self, uri: str, manifest: Manifest) -> None:
                pass

        stack.publisher._sender = Late()
        version = await stack.publish(weights(2))
        await stack.until(lambda r: "not there" in r.error or "no file" in r.error)
        manifest = FolderStore(config.store_folder).read_manifest(
            (await stack.client.list_versions(timeout_s=5)).versions[-1].manifest_uri
        )
        hidden[0].rename(hidden[0].with_name(manifest.payloads[0].name))
        await stack.reached(version)
        stack.publisher._sender = None
        await stack.reached(await stack.publish(weights(3)))
        bases = [v.base for v in (await stack.client.list_versions(timeout_s=5)).versions]
        assert bases == ([0, 0, 0] if codec == "dense" else [0, 1, 2])


async def test_an_anchor_ends_the_wait_after_failures(
    config: WeightSyncConfig, run_service: Any, engine: FakeEngine, weights: Weights
) -> None:
    receiver = receiving(config, engine).receiver.model_copy(update={"retry_s": 60.0})
    async with opened(run_service, config.model_copy(update={"receiver": receiver})) as stack:
        await stack.reached(await stack.publish(weights(1)))
        engine.faults.append(Fault.REFUSE)
        await stack.publish(weights(2))
        await stack.until(lambda r: r.phase is Phase.POISONED)
        stack.publisher._snapshot = None  # the next one is an anchor
        await stack.reached(await stack.publish(weights(3)))
        stack.assert_truthful(engine)


async def test_a_service_that_is_away_does_not_keep_a_delta_from_being_written(
    stack: Stack, engine: FakeEngine, weights: Weights, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    await stack.publish(weights(1))

    async def away(*_: Any, **__: Any) -> None:
        raise Unavailable("the service is away")

    monkeypatch.setattr(WeightClient, "plan_version", away)
    await stack.reached(await stack.publish(weights(2)))
    assert stack.publisher.last is not None
    assert stack.publisher.last.base == (0 if codec == "dense" else 1)


async def test_without_a_model_folder_the_error_says_what_to_set(
    config: WeightSyncConfig, run_service: Any, engine: FakeEngine, weights: Weights
) -> None:
    (engine.base_model / "config.json").unlink()
    async with opened(run_service, receiving(config, engine)) as stack:
        await stack.publish(weights(1))
        report = await stack.until(lambda r: r.error != "")
        assert "Set receiver.base_model" in report.error
        assert engine.calls == []


async def test_an_engine_whose_tensors_have_other_names_is_not_waved_through(
    config: WeightSyncConfig, run_service: Any, engine: FakeEngine, weights: Weights
) -> None:
    engine.fuses = True
    async with opened(run_service, receiving(config, engine)) as stack:
        await stack.publish(weights(1))
        report = await stack.until(lambda r: r.phase is Phase.POISONED)
        assert "names no tensor embed" in report.error
        assert "Set receiver.verify to 'label'" in report.error
        assert engine.served == []


async def test_by_label_alone_every_start_is_a_full_load(
    config: WeightSyncConfig, run_service: Any, engine: FakeEngine, weights: Weights
) -> None:
    async with opened(run_service, receiving(config, engine, verify="label")) as stack:
        version = await stack.publish(weights(1))
        await stack.reached(version)
        assert "/weights_checker" not in [path for path, _ in engine.calls]
        await stack.service.stop()
        engine.calls.clear()
        await stack.service.start()
        await stack.reached(version)
        assert "/update_weights_from_disk" in [path for path, _ in engine.calls]


async def test_old_shadows_are_deleted(
    config: WeightSyncConfig, run_service: Any, engine: FakeEngine, weights: Weights
) -> None:
    async with opened(run_service, receiving(config, engine)) as stack:
        for seed in range(1, 5):
            await stack.reached(await stack.publish(weights(seed)))
        await stack.until_all(lambda _: len(shadows_in(config)) == 1)
        assert shadows_in(config)[0].startswith("0000000004-")


def shadows_in(config: WeightSyncConfig) -> list[str]:
    return [path.name for path in config.shadow_folder.iterdir() if path.is_dir()]


async def test_a_receiver_of_another_host_follows_the_same_service(
    config: WeightSyncConfig, run_service: Any, engine: FakeEngine, weights: Weights
) -> None:
    async with opened(run_service, config) as stack:
        far = ReceiverConfig(
            only=True,
            service=ChannelConfig(target=stack.service.address),
            host="far away",
            engines=(StaticEngine(url=engine.url),),
            poll_interval_s=0.02,
        )
        changed = config.model_copy(update={"receiver": far})
        async with run_service(changed):
            version = await stack.publish(weights(1))
            await stack.reached(version)
            (node,) = (await stack.client.list_nodes(timeout_s=5)).nodes
            assert (node.node_id, node.host) == ("receiver@far away", "far away")
            assert engine.root() == stack.roots["1"]


async def test_a_token_guards_the_service_and_its_own_receiver_has_it(
    config: WeightSyncConfig, run_service: Any, engine: FakeEngine, weights: Weights
) -> None:
    server = config.server.model_copy(update={"token": SecretStr("a token of its own")})
    changed = receiving(config, engine).model_copy(update={"server": server})
    async with run_service(changed) as service:
        async with open_channel(ChannelConfig(target=service.address)) as channel:
            with pytest.raises(Unauthenticated):
                await Publisher.acquire(channel, run="run")
        trusted = ChannelConfig(target=service.address, token=SecretStr("a token of its own"))
        async with open_channel(trusted) as channel:
            publisher = await Publisher.acquire(channel, run="run", config=opened.publish)
            version = await publisher.publish(weights(1), step=1)
            client = WeightClient(channel)
            assert (await client.await_version(version.number, timeout_s=10)).engines == 1
