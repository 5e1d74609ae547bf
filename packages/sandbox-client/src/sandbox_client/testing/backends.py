"""The back-ends that the contract's tests run over: how a service of each is started.

A new back-end joins by an entry in `BACKENDS`. Its tests carry the entry's marks and are skipped,
with the reason, where it cannot run.
"""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sandbox_client.backends.local.host import isolation_problems
from sandbox_client.backends.local.users import with_jail_alone
from sandbox_client.testing.dockerd import Dockerd, dockerd_missing, running_dockerd
from sandbox_client.testing.e2b_endpoint import API_KEY, serving_endpoint, tagged_sandboxes
from sandbox_client.testing.host_image import write_host_image
from sandbox_client.testing.leftovers import processes_of, service_cgroups
from sandbox_client.testing.ordinary_user import OrdinaryUser
from sandbox_client.testing.podman import podman_missing, running_podman
from sandbox_client.testing.service import RunningService

__all__ = ["BACKENDS", "IN_PYTHON", "ORDINARY_USERS", "PODMAN", "BackendUnderTest"]


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
    patience: float = 1.0
    """Factor on times in which a test expects sandboxes to be made, beside `local`."""
    user: OrdinaryUser | None = None
    """Who runs its services, if not root."""
    kind: str = ""
    """What sets it apart from others of the same name."""

    @property
    def label(self) -> str:
        """How its tests name it."""
        return f"{self.name}, {self.kind}" if self.kind else self.name

    @property
    def commands_uid(self) -> int:
        """The host's id under which its commands run."""
        return self.user.commands_uid if self.user else 65534

    @contextlib.contextmanager
    def ready(self) -> Iterator["BackendUnderTest"]:
        """The back-end with all that it needs running."""
        with self.needs() as settings:
            yield replace(self, settings=(f"backend={self.name}", *self.settings, *settings))

    def service(self, folder: Path, *settings: str) -> RunningService:
        """A service of it, not yet started."""
        # A secret, to look for inside.
        environ = {"SECRET_TOKEN": "hunter2"}
        return RunningService(folder, *self.settings, *settings, environ=environ, user=self.user)


def _local_missing() -> str:
    problems = isolation_problems()
    return f"sandboxes cannot be isolated here: {'; '.join(problems)}" if problems else ""


def _local_leftovers(state_dir: Path) -> list[str]:
    return [str(path) for path in service_cgroups(state_dir)]


_BASE_IMAGE = "tailrace-test-base:latest"


@contextlib.contextmanager
def _with_daemon(
    running: Callable[[], AbstractContextManager[Dockerd]],
) -> Iterator[tuple[str, ...]]:
    with running() as daemon, tempfile.TemporaryFile() as root:
        write_host_image(root)
        root.seek(0)
        daemon.import_image(root, _BASE_IMAGE)
        yield (
            f"docker.socket={daemon.socket}",
            f"docker.base_image={_BASE_IMAGE}",
            "docker.disk_watermark=1",  # however full this host is
        )


def _docker_mounts(state_dir: Path) -> list[str]:
    """Its containers cannot outlive the daemon; mounts can."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    places = [line.split()[1] for line in mounts]
    return [place for place in places if place.startswith(f"{state_dir}/")]


_e2b_url: list[str] = []
"""Where the endpoint of the tests is, while it runs."""


@contextlib.contextmanager
def _e2b_endpoint() -> Iterator[tuple[str, ...]]:
    """The official SDK against this package's own endpoint over `local`: no cloud, no key."""
    local = BACKENDS["local"]
    # Every template that is built takes a snapshot.
    needs = ("backend=local", "limits.commands=512", "limits.snapshots=512")
    with serving_endpoint(*local.quick, *needs) as endpoint:
        _e2b_url.append(endpoint.url)
        yield (
            f"e2b.api_url={endpoint.url}",
            f"e2b.sandbox_url={endpoint.url}",
            f"e2b.api_key={API_KEY}",
        )
        _e2b_url.clear()


def _e2b_missing() -> str:
    if importlib.util.find_spec("e2b") is None:
        return "the extra e2b is not installed"
    return _local_missing()


def _e2b_leftovers(state_dir: Path) -> list[str]:
    """The sandboxes at the endpoint that carry the service's tag."""
    return tagged_sandboxes(_e2b_url[0], (state_dir / "e2b" / "service-id").read_text())


BACKENDS: Mapping[str, BackendUnderTest] = {
    backend.name: backend
    for backend in (
        BackendUnderTest(
            name="local",
            missing=_local_missing,
            leftovers=_local_leftovers,
            # Compiling the stand-in for python takes a while.
            quick=("local.compile_shim=false",),
        ),
        BackendUnderTest(
            name="docker",
            missing=dockerd_missing,
            leftovers=_docker_mounts,
            needs=partial(_with_daemon, running_dockerd),
            marks=("docker",),
            many=4,
            patience=10.0,
        ),
        BackendUnderTest(
            name="e2b",
            missing=_e2b_missing,
            leftovers=_e2b_leftovers,
            needs=_e2b_endpoint,
            marks=("e2b",),
            # The endpoint's sandboxes have one user, and these tests expect a clean start.
            settings=("e2b.admin_user=user", "e2b.reattach=false"),
            many=16,
        ),
    )
}
"""By name. Tests under tests/contract/ run over all of them, all others over `local` alone."""

PODMAN = replace(
    BACKENDS["docker"],
    kind="podman",
    missing=podman_missing,
    needs=partial(_with_daemon, running_podman),
)
"""Back-end `docker` with podman at its socket."""


IN_PYTHON = replace(
    BACKENDS["local"], kind="launcher in Python", settings=("local.compile_launcher=false",)
)
"""Back-end `local` as it is where there is no C compiler."""


_TRY = "from sandbox_client.backends.local.jail import own_users; own_users.try_isolation()"
_USER = OrdinaryUser(20001)
_USER_WITH_IDS = OrdinaryUser(20001, subordinate=1_000_000)


def _user_missing() -> str:
    if os.geteuid() != 0:
        return "only root can start a service as another user"
    done = subprocess.run(
        _USER.command(with_jail_alone(_TRY)), capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else f"as an ordinary user: {done.stdout or done.stderr}"


def _user_with_ids_missing() -> str:
    if not (shutil.which("newuidmap") and Path("/etc/subuid").exists()):
        return "newuidmap and /etc/subuid are not there (Debian: uidmap)"
    return _user_missing()


def _first_processes(state_dir: Path) -> list[str]:
    """Those of sandboxes, by their own user namespaces: an ordinary user has no cgroups."""
    found = []
    for pid in processes_of(state_dir):
        with contextlib.suppress(OSError):  # it has ended
            inside = Path(f"/proc/{pid}/uid_map").read_text().split()[0]
            if inside != "0":  # that of the fork-server and its spares
                found.append(f"process {pid}")
    return found


_NOT_ROOT = replace(BACKENDS["local"], leftovers=_first_processes)
ORDINARY_USERS = (
    replace(_NOT_ROOT, user=_USER, kind="ordinary user", missing=_user_missing),
    replace(
        _NOT_ROOT,
        user=_USER_WITH_IDS,
        kind="ordinary user with subordinate ids",
        missing=_user_with_ids_missing,
    ),
)
"""Back-end `local` as users run it who are not root."""
