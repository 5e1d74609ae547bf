"""What back-ends whose sandboxes run on this host decide and prepare alike."""

import fcntl
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from service_kit.errors import StartupError

from sandbox_client.backends.local.jail.python_args import BASE_ENVIRON
from sandbox_client.backends.local.store import EnvironmentStore
from sandbox_client.core.paths import PathRefusedError, check_mount_point
from sandbox_client.errors import EnvironmentUnknown, WrongRequest

__all__ = [
    "allow_many_open_files",
    "check_user",
    "check_workdir",
    "command_environ",
    "require_environment",
    "take_lock",
]


def take_lock(state: Path) -> IO[bytes]:
    """Makes sure that no other service uses the state folder, as long as the file is open."""
    state.mkdir(parents=True, exist_ok=True)
    lock = (state / "lock").open("a+b")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise StartupError(
            f"state_dir {state} is in use by another sandbox service; stop that one or set "
            "another state_dir"
        ) from None
    return lock


def allow_many_open_files() -> None:
    """Every sandbox holds a few descriptors; the usual soft limit is meant for other programs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_workdir(workdir: str, writable: Sequence[str]) -> None:
    """Raises `WrongRequest` unless a sandbox can have its work folder there."""
    try:
        check_mount_point(workdir)
    except PathRefusedError as error:
        raise WrongRequest(f"workdir: {error}") from error
    for other in writable:
        if f"{workdir}/".startswith(f"{other}/") or f"{other}/".startswith(f"{workdir}/"):
            raise WrongRequest(f"workdir {workdir} overlaps the writable folder {other}")


def require_environment(store: EnvironmentStore, digest: str) -> None:
    """Raises `EnvironmentUnknown` unless the environment is stored."""
    if digest not in store:
        raise EnvironmentUnknown(
            f"this host does not hold environment {digest or '(none)'}; put it with "
            "PutEnvironment, then create again",
            metadata={"digest": digest},
        )


def check_user(backend: str, user: str, uid: int, asked: str) -> None:
    """Raises `WrongRequest` if a command asks for another user than the sandbox's own."""
    if asked not in ("", user, str(uid)):
        raise WrongRequest(
            f"user {asked!r}: back-end `{backend}` runs every command as {user!r}, who has no "
            "privileges; leave it empty"
        )


def command_environ(user: str, path: str, added: Mapping[str, str]) -> dict[str, str]:
    """Variables of every command."""
    return {
        "HOME": "/tmp",  # noqa: S108 -- inside the sandbox
        "PATH": path,
        "USER": user,
        "LOGNAME": user,
        "SHELL": "/bin/sh",
        "TERM": "dumb",
        **BASE_ENVIRON,
        **added,
    }
