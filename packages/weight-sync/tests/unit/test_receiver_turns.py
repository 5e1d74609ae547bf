"""A receiver's loops share one table of engines: what one does between two steps of another."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from weight_sync.config import ReceiverConfig, StaticEngine
from weight_sync.core.manifest import Manifest
from weight_sync.core.receiver import Phase
from weight_sync.drivers import Activation, Observation
from weight_sync.files import CopyFiles
from weight_sync.receiver import Receiver
from weight_sync.shadow import ShadowFolder
from weight_sync.stores import FolderStore
from weight_sync.types import AnnouncedVersion, EngineReport


class Service:
    """Announces what it is told to, and remembers what was reported."""

    def __init__(self) -> None:
        self.announced: asyncio.Queue[AnnouncedVersion] = asyncio.Queue()
        self.reports: Sequence[EngineReport] = ()
        self._reported = asyncio.Condition()

    async def watch_versions(self, *_: Any, **__: Any) -> AsyncIterator[AnnouncedVersion]:
        while True:
            yield await self.announced.get()

    async def register_node(self, **_: Any) -> None: ...

    async def list_nodes(self, **_: Any) -> Any:
        return SimpleNamespace(nodes=())

    async def report_engines(self, _: str, reports: Sequence[EngineReport], **__: Any) -> None:
        async with self._reported:
            self.reports = reports
            self._reported.notify_all()

    async def serves(self, number: int) -> None:
        """Wait until its engine is reported to serve a version."""
        async with self._reported, asyncio.timeout(10):
            await self._reported.wait_for(
                lambda: [(r.phase, r.version) for r in self.reports] == [(Phase.SERVING, number)]
            )


class RestartingEngine:
    """An engine that is found to have restarted some turns of the loop after a moment."""

    def __init__(self) -> None:
        self.label = "default"
        self.moment = asyncio.Event()
        self.asked = asyncio.Event()
        self.restarts_after: int | None = None

    async def observe(self) -> Observation:
        if self.restarts_after is not None:
            turns, self.restarts_after = self.restarts_after, None
            self.moment.clear()
            self.asked.set()
            await self.moment.wait()
            for _ in range(turns):
                await asyncio.sleep(0)
            self.label = "default"
        return Observation(self.label, None)

    async def activate(self, folder: Path, manifest: Manifest) -> Activation:
        self.label = manifest.version.label
        return Activation(0.0, 0.0, 0.0)

    async def verify(self, manifest: Manifest) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


class Copies(CopyFiles):
    """Is told of a prepared version just before its engines are switched: that is the moment."""

    def __init__(self, engine: RestartingEngine) -> None:
        super().__init__()
        self._engine = engine

    def keep_only(self, *arguments: Any) -> None:
        super().keep_only(*arguments)
        self._engine.moment.set()


@pytest.mark.parametrize("turns", range(4))
async def test_an_engine_lost_just_before_its_activation_gets_the_version_all_the_same(
    tmp_path: Path, base_model: Path, versions: Any, turns: int
) -> None:
    store = FolderStore.at(tmp_path / "store")
    service, engine = Service(), RestartingEngine()
    shadows = ShadowFolder(tmp_path / "shadow")
    config = ReceiverConfig(
        host="host",
        engines=(StaticEngine(url="http://engine"),),
        base_model=base_model,
        verify="label",
        poll_interval_s=0.001,
        report_interval_s=0.01,
    )

    async def announce(number: int) -> str:
        uri = versions.put(store, number)
        version = store.read_manifest(uri).version
        await service.announced.put(
            AnnouncedVersion(version=version, manifest_uri=uri, payload_bytes=0)
        )
        return version.label

    receiver = Receiver(
        config,
        service,  # type: ignore[arg-type]
        shadows,
        make_driver=lambda _: engine,
        copies=Copies(engine),
    )
    running = asyncio.create_task(receiver.run())
    try:
        await announce(1)
        await service.serves(1)
        engine.restarts_after = turns
        await engine.asked.wait()
        label = await announce(2)
        async with asyncio.timeout(10):
            while engine.label != label:
                await asyncio.sleep(0.001)
                await service.serves(2)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        shadows.close()
