"""Real services as processes of their own, for the tests that need one. Needs root."""

import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sandbox_client import EnvironmentTree, Sandbox, SandboxClient
from sandbox_client.testing.backends import (
    BACKENDS,
    IN_PYTHON,
    ORDINARY_USERS,
    PODMAN,
    BackendUnderTest,
)
from sandbox_client.testing.dockerd import Dockerd
from sandbox_client.testing.service import RunningService


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs the contract's tests over every back-end, others over their folder's, or `local`.

    What runs over `local` in the folders escapes and local also runs with its launcher in Python,
    and the contract in the long form. There contract and escapes run for services of ordinary users
    too, and the contract over podman. A module with other back-ends names them: `BACKENDS`.
    """
    if "backend" in metafunc.fixturenames:
        folder = metafunc.definition.path.relative_to(Path(__file__).parent).parts[0]
        known = {**BACKENDS, PODMAN.kind: PODMAN, IN_PYTHON.kind: IN_PYTHON}
        usual = BACKENDS if folder == "contract" else [folder if folder in known else "local"]
        named = getattr(metafunc.module, "BACKENDS", None)
        chosen = [known[name] for name in named or usual]
        if folder == "contract" and BACKENDS["docker"] in chosen:
            chosen.append(replace(PODMAN, marks=("slow",)))
        if BACKENDS["local"] in chosen:
            if folder == "contract":
                chosen.append(replace(IN_PYTHON, marks=("slow",)))
            elif folder in ("escapes", "local") and named is None:
                chosen.append(IN_PYTHON)
        if folder in ("contract", "escapes") and BACKENDS["local"] in chosen:
            kinds = ORDINARY_USERS if folder == "escapes" else ORDINARY_USERS[:1]
            chosen += [replace(user, marks=("slow",)) for user in kinds]
        params = [
            pytest.param(b, id=b.label, marks=[getattr(pytest.mark, mark) for mark in b.marks])
            for b in chosen
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


@pytest.fixture(params=ORDINARY_USERS, ids=[b.kind for b in ORDINARY_USERS])
def ordinary(request: pytest.FixtureRequest) -> BackendUnderTest:
    """Back-end `local` of a user who is not root, of each kind."""
    chosen: BackendUnderTest = request.param
    missing = chosen.missing()
    if missing:
        pytest.skip(missing)
    return chosen


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may pass and write to: pytest's own is closed to them."""
    with tempfile.TemporaryDirectory(prefix="sandbox-service-") as name:
        Path(name).chmod(0o777)
        yield Path(name)


@pytest.fixture(scope="session")
def service(backend: BackendUnderTest) -> Iterator[RunningService]:
    """One service for all tests that leave it as they found it."""
    # Not pytest's own folder: another session of pytest may clear that while this one runs.
    with tempfile.TemporaryDirectory(prefix="sandbox-service-") as folder:
        settings = ("lease.reap_interval_s=0.1", "sandbox.inodes=16384")
        running = backend.service(Path(folder), *settings)
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
