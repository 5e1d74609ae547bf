"""One host's receiver: prepares one shadow copy, then switches the host's engines to it in turn.

Four loops share one event loop and one table of engines:

    watch    follows the announced versions and remembers the newest
    look     follows the registry, and asks each engine what it says of itself
    update   prepares the newest version and activates it, engine after engine
    report   tells the service about every change

Only `update` touches engines, one at a time, so capacity never drops by more than one.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from service_kit.errors import ServiceError
from service_kit.telemetry import parent_context

from weight_sync.client import WeightClient
from weight_sync.config import ReceiverConfig
from weight_sync.core.receiver import (
    Activate,
    Activated,
    ActivateFailed,
    Attempts,
    Event,
    Phase,
    Prepare,
    Prepared,
    PrepareFailed,
    Verified,
    doubt,
    supersedes,
    transition,
    wants,
)
from weight_sync.drivers.factory import DriverFactory, driver_factory
from weight_sync.engine import Engine
from weight_sync.errors import BaseModelUnknown, EngineError, UnknownEngineKind, WeightSyncError
from weight_sync.files import CopyFiles
from weight_sync.shadow import Shadow, ShadowFolder
from weight_sync.telemetry import Instruments, tracer
from weight_sync.types import AnnouncedVersion, EngineEndpoint, EngineReport

logger = logging.getLogger(__name__)


class Receiver:
    """Keeps the engines of one host at the newest version. `run` is its whole life."""

    def __init__(
        self,
        config: ReceiverConfig,
        client: WeightClient,
        shadows: ShadowFolder,
        *,
        make_driver: DriverFactory | None = None,
        copies: CopyFiles | None = None,
        file_target: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Receive for the engines of `config.host`.

        Args:
            config: the receiver's settings.
            client: to the WeightService.
            shadows: where verified copies are made.
            make_driver: None: by the engine's kind.
            copies: told which copy others may fetch.
            file_target: where they can; empty: nowhere.
            clock: monotonic seconds.
        """
        self._config = config
        self._client = client
        self._shadows = shadows
        self._make_driver = make_driver or driver_factory(config)
        self._copies = copies or CopyFiles()
        self._file_target = file_target
        self._clock = clock
        self._engines: dict[str, Engine] = {}
        self._newest: AnnouncedVersion | None = None
        self._seen: set[int] = set()
        self._attempts = Attempts(config.stuck_after)
        self._instruments = Instruments()
        self._work = asyncio.Event()
        self._changed = asyncio.Event()

    def reports(self) -> list[EngineReport]:
        """Return what is known of each engine now."""
        return [engine.report() for engine in self._engines.values()]

    async def run(self) -> None:
        """Work until cancelled; a service that is away is waited for."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch())
                group.create_task(self._look())
                group.create_task(self._update())
                group.create_task(self._report())
        finally:
            for engine in self._engines.values():
                await engine.driver.close()

    # watch

    async def _watch(self) -> None:
        config = self._config
        while True:
            async with self._service_away("follow the versions"):
                stream = self._client.watch_versions(
                    config.run, idle_timeout_s=config.idle_timeout_s
                )
                async for announced in stream:
                    self._seen.add(announced.version.number)
                    known = self._newest.version if self._newest else None
                    if supersedes(announced.version, known):
                        self._newest = announced
                        if announced.base == 0:
                            # It may be the way out for which an engine waits.
                            for engine in self._engines.values():
                                engine.retry_at_s = 0.0
                        self._work.set()
            await asyncio.sleep(config.poll_interval_s)

    # look

    async def _look(self) -> None:
        while True:
            async with self._service_away("read the registry"):
                await self._follow_registry()
            async with asyncio.TaskGroup() as group:
                for engine in list(self._engines.values()):
                    group.create_task(self._observe(engine))
            await asyncio.sleep(self._config.poll_interval_s)

    async def _follow_registry(self) -> None:
        config = self._config
        own = [EngineEndpoint(engine.url, engine.kind) for engine in config.engines]
        if own:
            await self._client.register_node(
                node_id=f"receiver@{config.host}",
                host=config.host,
                rollout_target="",
                engines=own,
                lease_s=0,
                timeout_s=config.call_timeout_s,
            )
        found = await self._client.list_nodes(timeout_s=config.call_timeout_s)
        wanted = {endpoint.url: endpoint for endpoint in own}
        for node in found.nodes:
            if node.host == config.host:
                wanted |= {e.url: EngineEndpoint(e.url, e.kind) for e in node.engines}
        for url in self._engines.keys() - wanted.keys():
            if not self._engines[url].is_activating():
                await self._engines.pop(url).driver.close()
                logger.info("engine %s is gone from the registry", url)
        for url in wanted.keys() - self._engines.keys():
            try:
                driver = self._make_driver(wanted[url])
            except UnknownEngineKind:
                logger.exception("engine %s is left alone", url)
                continue
            self._engines[url] = Engine(wanted[url], driver)
            logger.info("engine %s joined", url)

    async def _observe(self, engine: Engine) -> None:
        if engine.is_activating():
            return
        label: str | None = None
        with suppress(EngineError):
            # What matters of the failure is in the state: the engine does not answer.
            seen = await engine.driver.observe()
            label = seen.label
            engine.base_model = seen.base_model or engine.base_model
        if engine.is_activating():
            return  # It began meanwhile: this answer is of the past.
        if engine.label is None and label is not None:
            engine.retry_at_s = 0.0
        engine.label = label
        event = doubt(engine.state, label)
        if event is not None and (engine.state.held or engine.state.error != event.error):
            logger.warning("engine %s: %s", engine.endpoint.url, event.error)
            self._apply(engine, event)
        if self._due(engine):
            self._work.set()

    # update

    def _due(self, engine: Engine) -> bool:
        newest = self._newest.version if self._newest else None
        return (
            engine.label is not None
            and self._clock() >= engine.retry_at_s
            and wants(engine.state, newest)
        )

    async def _update(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            newest = self._newest
            due = [engine for engine in self._engines.values() if self._due(engine)]
            if newest is None or not due:
                continue
            with tracer().start_as_current_span(
                "weight_sync.update", context=parent_context(newest.traceparent)
            ) as span:
                span.set_attribute("weight_sync.version", newest.version.number)
                await self._bring(due, newest)
            # Whatever was announced or joined during the pass is for the next one.
            self._work.set()

    async def _bring(self, engines: list[Engine], announced: AnnouncedVersion) -> None:
        engines = await self._adopt(engines, announced)
        for engine in engines:
            self._apply(engine, Prepare(announced.version))
        shadow = await self._prepare(engines, announced)
        if shadow is None:
            return
        for engine in engines:
            if engine.state.phase is Phase.PREPARING:
                engine.prepare_s = shadow.prepare_s
                engine.payload_bytes = announced.payload_bytes
                self._apply(engine, Prepared())
        for engine in engines:
            # It may have been lost since; then the next pass sees to it.
            if engine.state.phase is Phase.READY:
                # At once: a look in between could still find it lost.
                self._apply(engine, Activate())
                await _undisturbed(self._activate(engine, shadow))
        await asyncio.to_thread(self._shadows.prune, [shadow.folder])

    async def _adopt(self, engines: list[Engine], announced: AnnouncedVersion) -> list[Engine]:
        """Take engines that can prove they hold the version already; return the others.

        That is how a restarted receiver finds its engines. One that its predecessor left paused
        goes on generating, now that its weights are known to be whole.
        """
        rest = []
        for engine in engines:
            proven = False
            if (
                engine.state.phase is Phase.UNKNOWN
                and engine.label == announced.version.label
                and self._config.verify == "checksums"
            ):
                try:
                    manifest = await asyncio.to_thread(self._shadows.read_manifest, announced)
                    await engine.driver.verify(manifest)
                    await engine.driver.resume()
                    proven = engine.state.phase is Phase.UNKNOWN
                except (WeightSyncError, OSError) as error:
                    logger.warning("engine %s: %s; loading it anew", engine.endpoint.url, error)
            if proven:
                self._apply(engine, Verified(announced.version))
            else:
                rest.append(engine)
        return rest

    async def _prepare(self, engines: list[Engine], announced: AnnouncedVersion) -> Shadow | None:
        if not engines:
            return None
        try:
            base = self._base_model(engines)
            async with asyncio.timeout(self._config.prepare_timeout_s):
                history = await self._history(announced)
                shadow = await asyncio.to_thread(self._shadows.prepare, announced, base, history)
        except (WeightSyncError, ServiceError, OSError) as error:  # TimeoutError is an OSError
            reason = str(error) or f"not prepared within {self._config.prepare_timeout_s:g} s"
            logger.warning("version %d: %s", announced.version.number, reason)
            self._instruments.failures.add(1, {"step": "prepare"})
            if isinstance(error, WeightSyncError) and error.anchor_helps:
                self._attempts.failed(announced.version.number)
            for engine in engines:
                if engine.state.phase is Phase.PREPARING:
                    self._apply(engine, PrepareFailed(reason))
                self._back_off(engine)
            return None
        self._attempts.succeeded()
        self._instruments.prepare_s.record(shadow.prepare_s)
        self._instruments.fetched_bytes.add(shadow.moved_bytes)
        version = shadow.manifest.version
        # The one that stays when this pass prunes.
        self._copies.keep_only(
            version.run, version.number, shadow.manifest.to_bytes(), shadow.folder
        )
        return shadow

    async def _history(self, announced: AnnouncedVersion) -> Sequence[AnnouncedVersion]:
        """Return the versions that a delta may build on."""
        if not announced.base:
            return []
        run, timeout_s = announced.version.run, self._config.call_timeout_s
        return (await self._client.list_versions(run, timeout_s=timeout_s)).versions

    def _base_model(self, engines: Iterable[Engine]) -> Path:
        bases = [self._config.base_model, *(engine.base_model for engine in engines)]
        for base in bases:
            if base is not None:
                if (base / "config.json").is_file():
                    return base
                raise BaseModelUnknown(
                    f"no config.json in {base}: expected an HF model folder. "
                    "Set receiver.base_model to the folder that the engines were started with"
                )
        raise BaseModelUnknown(
            "no engine says which folder it was started with. Set receiver.base_model to it"
        )

    async def _activate(self, engine: Engine, shadow: Shadow) -> None:
        began_s = time.perf_counter()
        try:
            took = await engine.driver.activate(shadow.folder, shadow.manifest)
        except (WeightSyncError, OSError) as error:
            logger.warning("engine %s is poisoned: %s", engine.endpoint.url, error)
            self._instruments.failures.add(1, {"step": "activate"})
            self._apply(engine, ActivateFailed(str(error) or type(error).__name__))
            self._back_off(engine)
            return
        engine.activate_s = time.perf_counter() - began_s
        engine.pause_s = took.pause_s
        engine.label = shadow.manifest.version.label
        engine.failures = 0
        self._apply(engine, Activated())
        self._instruments.activate_s.record(engine.activate_s)
        self._instruments.pause_s.record(engine.pause_s)
        self._instruments.load_s.record(took.load_s)
        self._instruments.verify_s.record(took.verify_s)
        logger.info(
            "engine %s serves version %s: prepared in %.1f ms, paused for %.1f ms",
            engine.endpoint.url,
            engine.label,
            engine.prepare_s * 1e3,
            engine.pause_s * 1e3,
        )

    def _back_off(self, engine: Engine) -> None:
        wait_s = self._config.retry_s * 2.0 ** min(engine.failures, 16)
        engine.failures += 1
        engine.retry_at_s = self._clock() + min(wait_s, self._config.max_retry_s)

    def _apply(self, engine: Engine, event: Event) -> None:
        engine.state = transition(engine.state, event)
        self._changed.set()

    # report

    async def _report(self) -> None:
        config = self._config
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(config.report_interval_s):
                    await self._changed.wait()
            self._changed.clear()
            for engine in self._engines.values():
                held = engine.state.held.number if engine.state.held else 0
                behind = sum(1 for number in self._seen if number > held)
                self._instruments.versions_behind.set(behind, {"engine": engine.endpoint.url})
            async with self._service_away("report"):
                await self._client.report_engines(
                    config.host,
                    self.reports(),
                    file_target=self._file_target,
                    copy_numbers=self._copies.numbers,
                    stuck_at=self._attempts.stuck_at,
                    timeout_s=config.call_timeout_s,
                )

    @asynccontextmanager
    async def _service_away(self, what: str) -> AsyncIterator[None]:
        """Survive a service that is restarting; every loop tries again by itself."""
        try:
            yield
        except ServiceError as error:
            logger.warning("could not %s: %s", what, error)


async def _undisturbed(work: Coroutine[Any, Any, None]) -> None:
    """Finish what has begun even when cancelled; the work has deadlines of its own.

    An engine in the midst of an activation would else stay paused for as long as nobody receives.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
