"""A real service as a process of its own, for the tests that need one. Needs root."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from sandbox_client import EnvironmentTree, Sandbox, SandboxClient
from sandbox_client.backends.local.host import isolation_problems
from service_kit.channel import ChannelConfig

START_TIMEOUT_S = 60.0


class RunningService:
    """`python -m sandbox_client serve`, with its folder and address."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.folder = folder
        self.state_dir = folder / "state"
        self.log = folder / "service.log"
        self._settings = settings
        self.process: subprocess.Popen[bytes] | None = None
        self.target = ""

    def start(self) -> None:
        address = self.folder / "address"
        address.unlink(missing_ok=True)
        options = [
            "server.bind=127.0.0.1:0",
            f"server.address_file={address}",
            f"state_dir={self.state_dir}",
            *self._settings,
        ]
        command = [sys.executable, "-m", "sandbox_client", "serve"]
        for option in options:
            command += ["--set", option]
        # A secret, to look for inside.
        environ = {**os.environ, "SECRET_TOKEN": "hunter2"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        end = time.monotonic() + START_TIMEOUT_S
        while not address.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, "the service did not start in time"
            time.sleep(0.02)
        self.target = address.read_text().strip()

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout=30)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(timeout=30)

    def client(self, **options: float | str) -> SandboxClient:
        return SandboxClient(ChannelConfig(target=self.target), **options)  # type: ignore[arg-type]


def require_isolation() -> None:
    problems = isolation_problems()
    if problems:
        pytest.skip(f"sandboxes cannot be isolated here: {'; '.join(problems)}")


@pytest.fixture(scope="session")
def service() -> Iterator[RunningService]:
    """One service for all tests that leave it as they found it."""
    require_isolation()
    # Not pytest's own folder: another session of pytest may clear that while this one runs.
    with tempfile.TemporaryDirectory(prefix="sandbox-service-") as folder:
        running = RunningService(Path(folder), "lease.reap_interval_s=0.1")
        running.start()
        yield running
        assert running.stop() == 0, running.log.read_text()


@pytest.fixture
def start_service() -> Iterator[Callable[..., RunningService]]:
    """Starts services of a test's own, with settings as for `--set`."""
    require_isolation()
    started: list[RunningService] = []
    folders = contextlib.ExitStack()

    def start(*settings: str) -> RunningService:
        folder = Path(folders.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-service-")))
        # The service of the other tests has the stand-in for python; compiling it takes a while.
        running = RunningService(folder, "local.compile_shim=false", *settings)
        running.start()
        started.append(running)
        return running

    with folders:
        yield start
        for running in started:
            if running.process is not None and running.process.poll() is None:
                running.stop()  # not killed: nobody would come after it to clean up


@pytest.fixture
async def client(service: RunningService) -> AsyncIterator[SandboxClient]:
    async with service.client() as connected:
        yield connected


REPOSITORY = EnvironmentTree(
    {
        "shop.py": b"def add(a, b):\n    return a - b\n",
        "test_shop.py": b"from shop import add\nassert add(1, 2) == 3, add(1, 2)\nprint('ok')\n",
        "pkg/__init__.py": b"",
        "pkg/data.txt": b"one\ntwo\nthree\n",
        "pkg/gone.txt": b"to be deleted\n",
        "image.bin": bytes(range(256)),
        "run.sh": b"#!/bin/sh\necho run\n",
    },
    executable=frozenset({"run.sh"}),
    links={"link": "pkg/data.txt"},
)


@pytest.fixture
def repository() -> EnvironmentTree:
    return REPOSITORY


@pytest.fixture
async def sandbox(client: SandboxClient, repository: EnvironmentTree) -> AsyncIterator[Sandbox]:
    async with await client.create(repository) as made:
        yield made
