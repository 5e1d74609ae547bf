"""The back-ends that the contract's tests run over: how a service of each is started.

A new back-end joins by an entry in `BACKENDS`. Its tests carry the entry's marks and are skipped,
with the reason, where it cannot run.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from sandbox_client.backends.local.host import isolation_problems
from sandbox_client.testing.service import RunningService

__all__ = ["BACKENDS", "BackendUnderTest"]


@contextlib.contextmanager
def _no_needs() -> Iterator[tuple[str, ...]]:
    yield ()


@dataclass(frozen=True, kw_only=True)
class BackendUnderTest:
    """One back-end, as the contract's tests see it."""

    name: str
    """As in `backend = "..."`."""
    missing: Callable[[], str]
    """Why it cannot run here; empty if it can."""
    leftovers: Callable[[Path], list[str]]
    """What on this host still belongs to sandboxes of the service with this state folder."""
    needs: Callable[[], AbstractContextManager[tuple[str, ...]]] = _no_needs
    """Starts what its services need beside them, once for all tests, gives the settings that tell
    them of it (as for `--set`), and ends it."""
    settings: tuple[str, ...] = ()
    """Settings of its services."""
    quick: tuple[str, ...] = ()
    """Further ones for services that start often and serve one test."""
    marks: tuple[str, ...] = ()
    """Markers of its tests; without any they belong to the plain test command."""
    many: int = 60
    """How many sandboxes a test may ask for at once."""

    @contextlib.contextmanager
    def ready(self) -> Iterator["BackendUnderTest"]:
        """The back-end with all that it needs running."""
        with self.needs() as settings:
            yield replace(self, settings=(f"backend={self.name}", *self.settings, *settings))

    def service(self, folder: Path, *settings: str) -> RunningService:
        """A service of it, not yet started."""
        # A secret, to look for inside.
        environ = {"SECRET_TOKEN": "hunter2"}
        return RunningService(folder, *self.settings, *settings, environ=environ)


def _local_missing() -> str:
    problems = isolation_problems()
    return f"sandboxes cannot be isolated here: {'; '.join(problems)}" if problems else ""


def _local_cgroups(state_dir: Path) -> list[str]:
    name = sha256(str(state_dir).encode()).hexdigest()[:12]
    return [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/tailrace/{name}/slot*")]


BACKENDS: Mapping[str, BackendUnderTest] = {
    backend.name: backend
    for backend in (
        BackendUnderTest(
            name="local",
            missing=_local_missing,
            leftovers=_local_cgroups,
            # Compiling the stand-in for python takes a while.
            quick=("local.compile_shim=false",),
        ),
    )
}
"""By name. Tests under tests/contract/ run over all of them, all others over `local` alone."""
