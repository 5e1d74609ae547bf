"""A service with the E2B-compatible endpoint, for tests and benchmarks of what talks to E2B."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sandbox_client.testing.service import RunningService

__all__ = ["API_KEY", "RunningEndpoint", "serving_endpoint", "tagged_sandboxes"]

API_KEY = "a-key-of-the-test-endpoint"


@dataclass(frozen=True)
class RunningEndpoint:
    """A running endpoint."""

    url: str
    service: RunningService


@contextlib.contextmanager
def serving_endpoint(*settings: str) -> Iterator[RunningEndpoint]:
    """Serves E2B's API over a back-end of its own; settings as for `--set`."""
    with tempfile.TemporaryDirectory(prefix="sandbox-e2b-") as folder:
        address = Path(folder) / "e2b-url"
        options = (
            "e2b_api.bind=127.0.0.1:0",
            f"e2b_api.address_file={address}",
            f"e2b_api.api_key={API_KEY}",
        )
        service = RunningService(Path(folder), *options, *settings)
        service.start()
        try:
            yield RunningEndpoint(address.read_text().strip(), service)
        finally:
            code = service.stop()
        if code != 0:
            raise RuntimeError(f"the service ended with {code}:\n{service.log.read_text()}")


def tagged_sandboxes(url: str, service_id: str) -> list[str]:
    """Ids of the sandboxes at an endpoint that a service with the back-end `e2b` has made."""
    # An extra: only who runs these tests has it.
    from e2b import E2B, SandboxQuery

    from sandbox_client.backends.e2b.tags import SERVICE_TAG

    client = E2B(api_key=API_KEY, api_url=url, sandbox_url=url)
    pages = client.Sandbox.list(query=SandboxQuery(metadata={SERVICE_TAG: service_id}))
    found: list[str] = []
    while pages.has_next:
        found += [info.sandbox_id for info in pages.next_items()]
    return found
