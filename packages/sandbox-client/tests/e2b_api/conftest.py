"""A service with the E2B-compatible endpoint, and the official SDK bound to it."""

import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from e2b import E2B, AsyncSandbox
from sandbox_client.testing.backends import BackendUnderTest
from sandbox_client.testing.service import RunningService

API_KEY = "a-key-of-the-endpoint"


@dataclass(frozen=True)
class Endpoint:
    """A running endpoint."""

    url: str
    service: RunningService

    def sdk(self, **options: object) -> E2B:
        """The official SDK, bound to this endpoint; without retries unless asked for."""
        params = {"api_key": API_KEY, "api_url": self.url, "sandbox_url": self.url, "retries": 0}
        return E2B(**{**params, **options})  # type: ignore[arg-type]


def start_endpoint(backend: BackendUnderTest, folder: Path, *settings: str) -> Endpoint:
    address = folder / "e2b-url"
    options = (
        "e2b_api.bind=127.0.0.1:0",
        f"e2b_api.address_file={address}",
        f"e2b_api.api_key={API_KEY}",
    )
    running = backend.service(folder, *backend.quick, *options, *settings)
    running.start()
    return Endpoint(address.read_text().strip(), running)


@pytest.fixture(scope="session")
def endpoint(backend: BackendUnderTest) -> Iterator[Endpoint]:
    """One endpoint for all tests that leave it as they found it."""
    with tempfile.TemporaryDirectory(prefix="sandbox-e2b-") as folder:
        started = start_endpoint(
            backend,
            Path(folder),
            "lease.reap_interval_s=0.1",
            "lease.max_s=600",
            "e2b_api.base_images={'python:3.11'='base'}",
        )
        yield started
        assert started.service.stop() == 0, started.service.log.read_text()


@pytest.fixture
def sdk(endpoint: Endpoint) -> E2B:
    return endpoint.sdk()


@pytest.fixture
async def box(sdk: E2B) -> AsyncIterator[AsyncSandbox]:
    """A sandbox of the SDK's."""
    made = await sdk.AsyncSandbox.create(timeout=120, metadata={"made": "here"}, envs={"TEAM": "e2b"})
    yield made
    await made.kill()


@pytest.fixture
def start_endpoint_with(backend: BackendUnderTest) -> Iterator[Callable[..., Endpoint]]:
    """Starts endpoints of a test's own, with settings as for `--set`."""
    with contextlib.ExitStack() as stack:

        def start(*settings: str) -> Endpoint:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-e2b-"))
            started = start_endpoint(backend, Path(folder), *settings)
            stack.callback(started.service.stop)
            return started

        yield start
