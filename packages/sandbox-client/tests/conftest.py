"""Real services as processes of their own, for the tests that need one. Needs root."""

import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from sandbox_client import EnvironmentTree, Sandbox, SandboxClient
from sandbox_client.testing.backends import BACKENDS, BackendUnderTest
from sandbox_client.testing.dockerd import Dockerd
from sandbox_client.testing.service import RunningService


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs the contract's tests over every back-end, others over their folder's, or `local`.

    A module with other ones names them: `BACKENDS`.
    """
    if "backend" in metafunc.fixturenames:
        folder = metafunc.definition.path.relative_to(Path(__file__).parent).parts[0]
        usual = BACKENDS if folder == "contract" else [folder if folder in BACKENDS else "local"]
        names = getattr(metafunc.module, "BACKENDS", usual)
        params = [
            pytest.param(b, id=b.name, marks=[getattr(pytest.mark, mark) for mark in b.marks])
            for b in map(BACKENDS.__getitem__, names)
        ]
        metafunc.parametrize("backend", params, indirect=True, scope="session")


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Iterator[BackendUnderTest]:
    """The back-end under test, with all that it needs running."""
    chosen: BackendUnderTest = request.param
    missing = chosen.missing()
    if missing:
        pytest.skip(missing)
    with chosen.ready() as ready:
        yield ready


@pytest.fixture(scope="session")
def service(backend: BackendUnderTest) -> Iterator[RunningService]:
    """One service for all tests that leave it as they found it."""
    # Not pytest's own folder: another session of pytest may clear that while this one runs.
    with tempfile.TemporaryDirectory(prefix="sandbox-service-") as folder:
        running = backend.service(Path(folder), "lease.reap_interval_s=0.1")
        running.start()
        yield running
        assert running.stop() == 0, running.log.read_text()


@pytest.fixture
def start_service(backend: BackendUnderTest) -> Iterator[Callable[..., RunningService]]:
    """Starts services of a test's own, with settings as for `--set`."""
    started: list[RunningService] = []
    folders = contextlib.ExitStack()

    def start(*settings: str) -> RunningService:
        folder = Path(folders.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-service-")))
        running = backend.service(folder, *backend.quick, *settings)
        running.start()
        started.append(running)
        return running

    with folders:
        yield start
        for running in started:
            if running.running:
                running.stop()  # not killed: nobody would come after it to clean up


@pytest.fixture(scope="session")
def dockerd(backend: BackendUnderTest) -> Dockerd:
    """The daemon behind the back-end `docker`."""
    (socket,) = (s for s in backend.settings if s.startswith("docker.socket="))
    return Dockerd.at(Path(socket.partition("=")[2]))


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
