"""Service, receivers, engines and publishers as processes that die; a look at them from outside."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import aiohttp
import safetensors.numpy
from service_kit.channel import Channel, ChannelConfig, open_channel
from service_kit.errors import DeadlineExceeded
from service_kit.server import ServerConfig
from tailrace.weight_sync.v1 import weight_service_pb2
from tailrace_cli.stack.health import free_ports
from weight_sync import FolderStore, PublishConfig, Publisher, WeightClient
from weight_sync.config import ReceiverConfig, RegistryConfig, StaticEngine, StoreConfig
from weight_sync.config import WeightSyncConfig as Config

from integration_tests.processes import status_of
from integration_tests.weight_chaos import roles
from integration_tests.weight_chaos.checker import Checker
from integration_tests.weight_chaos.roles import NEVER, Journal, Kill, weights_of

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([roles.__name__])
WAIT_S = 30.0


class Processes:
    """A service, and hosts with a receiver and engines each. Leave it by its context manager."""

    def __init__(
        self, folder: Path, *, hosts: int = 1, engines: int = 1, served: Path | None = None
    ) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.journal = folder / "journal"
        self.checker = Checker()
        self.names = [f"host-{n}" for n in range(hosts)]
        service_port, *ports = free_ports(1 + hosts * engines)
        self.target = f"127.0.0.1:{service_port}"
        self.engines = {
            name: ports[n * engines : (n + 1) * engines] for n, name in enumerate(self.names)
        }
        self.model = folder / "model"
        self.model.mkdir(parents=True)
        (self.model / "config.json").write_text("{}")
        safetensors.numpy.save_file(dict(weights_of(0)), self.model / "model.safetensors")
        self.served = served or self.model
        """What engines were started with."""
        self.clock = folder / "clock"
        self.clock.write_bytes(struct.pack("d", 0.0))
        self.journal.touch()
        self.running: dict[str, BaseProcess] = {}
        self._read: dict[Path, int] = {}
        self._written: list[Any] = []
        self._channel: Channel | None = None
        self._session: aiohttp.ClientSession | None = None

    # lives

    def start(self, name: str, role: Callable[..., None], *arguments: Any) -> BaseProcess:
        process = _FORKS.Process(target=role, args=arguments, name=name, daemon=True)
        process.start()
        self.running[name] = process
        return process

    def start_service(self) -> BaseProcess:
        config = Config(
            server=ServerConfig(bind=self.target, drain_grace_s=0.1),
            state_dir=self.folder / "state",
            store=StoreConfig(folder=self.store),
            registry=RegistryConfig(heartbeat_s=0.2, report_ttl_s=5.0, max_lease_s=10.0),
            receiver=ReceiverConfig(enabled=False),
        )
        log = str(self.folder / "service.log")
        return self.start("service", roles.run_host, config, log, Kill(NEVER), str(self.clock))

    def start_receiver(self, name: str, kill: Kill | None = None, **changes: Any) -> BaseProcess:
        receiver = ReceiverConfig(
            only=True,
            service=ChannelConfig(target=self.target, max_reconnect_backoff_s=0.1),
            host=name,
            engines=tuple(StaticEngine(url=self.url(port)) for port in self.engines[name]),
            base_model=self.served,
            shadow_folder=self.folder / f"shadow-{name}",
            poll_interval_s=0.03,
            report_interval_s=0.1,
            retry_s=0.03,
            max_retry_s=0.2,
            load_timeout_s=5.0,
            idle_timeout_s=2.0,
            **changes,
        )
        config = Config(
            server=ServerConfig(bind="127.0.0.1:0", drain_grace_s=0.1),
            state_dir=self.folder / f"state-{name}",
            receiver=receiver,
        )
        log = str(self.folder / f"{name}.log")
        kill = kill or Kill(NEVER)
        return self.start(name, roles.run_host, config, log, kill, str(self.clock))

    def start_engine(self, port: int, kill_at: int = NEVER) -> BaseProcess:
        log = str(self.engine_log(port))
        return self.start(f"engine-{port}", roles.run_engine, self.model, port, log, kill_at)

    def start_publisher(
        self,
        steps: Sequence[int],
        config: PublishConfig,
        *,
        lineage: int = 0,
        kill: Kill | None = None,
        pause_s: float = 0.0,
        name: str = "publisher",
    ) -> BaseProcess:
        log = str(self.folder / "publisher.log")
        return self.start(
            name, roles.run_publisher, self.target, self.store, self.journal, log, list(steps),
            config, lineage, kill, pause_s,
        )  # fmt: skip

    def start_all(self) -> None:
        """Start everything but a publisher."""
        self.start_service()
        for name in self.names:
            for port in self.engines[name]:
                self.start_engine(port)
            self.start_receiver(name)

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until it is gone."""
        process = self.running.pop(name)
        process.kill()
        process.join(WAIT_S)

    async def ended(self, process: BaseProcess, within_s: float = WAIT_S) -> int | None:
        """Wait for a process; return its exit code, None if it goes on."""
        await asyncio.to_thread(process.join, within_s)
        return process.exitcode

    async def asleep(self, process: BaseProcess) -> bool:
        """Wait until a process was stopped (True), or has ended."""
        while process.exitcode is None:
            assert process.pid is not None
            with suppress(OSError):
                if status_of(process.pid) == "T":
                    return True
            await asyncio.sleep(0.01)
        return False

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process, which may have ended by itself."""
        pid = self.running[name].pid
        assert pid is not None
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def set_clock(self, ahead_s: float) -> None:
        """Let the processes' monotonic clocks be so far ahead from now on."""
        with self.clock.open("r+b") as file:
            file.write(struct.pack("d", ahead_s))

    # looks

    @property
    def client(self) -> WeightClient:
        assert self._channel is not None
        return WeightClient(self._channel)

    @staticmethod
    def url(port: int) -> str:
        return f"http://127.0.0.1:{port}"

    def deaths(self, name: str) -> set[str]:
        """The steps before which processes of this name were killed."""
        lines = (self.folder / f"{name}.log").read_text().splitlines()
        before = "SIGKILL before: "
        return {line.removeprefix(before) for line in lines if line.startswith(before)}

    def engine_log(self, port: int) -> Path:
        return self.folder / f"engine-{port}.log"

    async def publisher(self, config: PublishConfig, sender: Journal | None = None) -> Publisher:
        """A publisher in this process."""
        assert self._channel is not None
        return await Publisher.acquire(
            self._channel,
            run="run",
            store=FolderStore(self.store),
            config=config,
            keep_latest=1,
            sender=sender or Journal(self.journal),
        )

    async def publish(self, publisher: Publisher, step: int, lineage: int = 0) -> int:
        """Publish a step and return the version's number."""
        assert isinstance(publisher._sender, Journal)
        publisher._sender.weights = weights_of(step, lineage)
        version = await publisher.publish(publisher._sender.weights, step=step)
        return version.number

    async def waited(self, number: int, *, engines: int = 0, within_s: float = WAIT_S) -> bool:
        """Wait until the engines hold a version this new; False: they do not by then."""
        with suppress(DeadlineExceeded):
            found = await self.client.await_version(number, engines=engines, timeout_s=within_s)
            return found.engines >= max(engines, 1)
        return False

    async def reached(self, number: int, engines: int = 0) -> None:
        """Wait until the engines hold a version this new; what they hold is checked."""
        if not await self.waited(number, engines=engines):
            logs = {p.name: p.read_text()[-2000:] for p in self.folder.glob("*.log")}
            nodes = await self.client.list_nodes(timeout_s=5)
            raise AssertionError(f"not all at version {number}: {nodes}\n{logs}")
        await self.check()

    async def newest(self) -> int:
        versions = (await self.client.list_versions("run", timeout_s=10)).versions
        return versions[-1].version.number if versions else 0

    async def check(self) -> None:
        """Compare all that engines said and hold, and what is claimed of them, with the journal."""
        nodes = (await self.client.list_nodes(timeout_s=10)).nodes
        claims = {e.url: str(e.version) for node in nodes for e in node.engines if e.version}
        held = {url: await self.ask(url) for url in claims}
        again = (await self.client.list_nodes(timeout_s=10)).nodes
        still = {e.url: str(e.version) for node in again for e in node.engines if e.version}
        said = [
            (f"engine {port}", line["label"], line["checksums"])
            for ports in self.engines.values()
            for port in ports
            for line in self.news(self.engine_log(port))
        ]
        # A publisher that was fenced off wrote a version, and nobody was told of it.
        announced = (await self.client.list_versions("run", timeout_s=10)).versions
        published = {(v.version.label, v.version.incarnation) for v in announced}
        self._written += self.news(self.journal)
        for line in self._written:
            if (line["label"], line["incarnation"]) in published:
                self.checker.published(line["label"], line["checksums"])
        for look in said:
            self.checker.looked(*look)
        for url, claim in claims.items():
            found = held[url]
            # A report is of the past: it counts if nothing changed meanwhile.
            if found is not None and still.get(url) == claim and found[0] == claim:
                self.checker.looked(f"the registry of {url}", claim, found[1])
        assert not self.checker.violations, self.checker.violations

    def news(self, path: Path) -> list[Any]:
        """The lines of a log that came since the last look."""
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        return [json.loads(line) for line in whole.splitlines() if line.startswith(b"{")]

    async def ask(self, url: str) -> tuple[str, dict[str, str]] | None:
        """An engine's label and the checksums of its own weights; None: it is not there."""
        assert self._session is not None
        try:
            async with self._session.get(f"{url}/model_info") as reply:
                before = (await reply.json())["weight_version"]
            body = {"action": "checksum"}
            async with self._session.post(f"{url}/weights_checker", json=body) as reply:
                checksums = (await reply.json())["ranks"][0]["checksums"]
            async with self._session.get(f"{url}/model_info") as reply:
                after = (await reply.json())["weight_version"]
        except (aiohttp.ClientError, OSError):
            return None
        return (before, checksums) if before == after else None


@asynccontextmanager
async def world(
    folder: Path, *, hosts: int = 1, engines: int = 1, served: Path | None = None
) -> AsyncIterator[Processes]:
    """Everything started but a publisher; nothing of it is left afterwards."""
    processes = Processes(folder, hosts=hosts, engines=engines, served=served)
    target = ChannelConfig(
        target=processes.target, wait_for_ready=True, max_reconnect_backoff_s=0.1
    )
    contracts = [weight_service_pb2.DESCRIPTOR]
    try:
        async with (
            open_channel(target, contracts=contracts) as channel,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
        ):
            processes._channel, processes._session = channel, session
            processes.start_all()
            yield processes
    finally:
        for process in processes.running.values():
            process.kill()
        for process in processes.running.values():
            process.join()
