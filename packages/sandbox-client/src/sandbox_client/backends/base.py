"""What a back-end has to be able to do. The service knows no more about it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import IO, Protocol, runtime_checkable

from sandbox_client.core.limits import LimiterStatus
from sandbox_client.types import (
    Command,
    EnvironmentRef,
    ExecResult,
    FileContent,
    ImageStatus,
    SandboxClaim,
    SandboxSpec,
)

__all__ = ["Backend", "BackendSandbox", "ExecHooks", "PullsImages", "Reattaching", "Recovered"]


@dataclass(frozen=True)
class ExecHooks:
    """How a caller takes part in a running command."""

    on_output: Callable[[str, bytes], None] | None = None
    """Called with "stdout" or "stderr" and the next bytes of the kept head, as they come."""
    stdin: AsyncIterator[bytes] | None = None
    """Standard input; None for an empty one."""
    killed: Awaitable[None] | None = None
    """When it is done, the command is killed with all that it started."""
    room: asyncio.Event | None = None
    """If given, nothing of the output is kept or left out: `on_output` gets every byte, and a
    command that writes has to wait while the event is unset."""


class BackendSandbox(Protocol):
    """One living sandbox. Every method may raise `SandboxGone` once it is not living any more."""

    async def run(self, command: Command, hooks: ExecHooks) -> ExecResult:
        """Runs one command to its end; its fields are complete (no zero stands for a default)."""

    async def write_files(self, files: Sequence[FileContent]) -> None:
        """Writes small files."""

    async def read_file(self, path: str, max_bytes: int) -> IO[bytes]:
        """Opens a file for reading; the caller closes it. Reading may block."""

    async def upload_tree(self, archive: IO[bytes], path: str) -> None:
        """Unpacks a tar into a folder."""

    async def download_tree(self, path: str, out: IO[bytes]) -> None:
        """Packs a folder into a tar."""

    async def diff(self, max_bytes: int) -> bytes:
        """The work folder against its environment, as a git-format diff."""

    async def apply_patch(self, patch: bytes) -> list[str]:
        """Applies a git-format diff to the work folder, all or nothing; returns the paths."""

    async def snapshot(self, snapshot_id: str) -> int:
        """Keeps its files under this id for `Backend.create`; returns their size in bytes.

        Raises:
            WrongRequest: this back-end cannot.
            QuotaExhausted, TooLarge: they do not fit.
        """

    async def destroy(self) -> None:
        """Ends everything in it and frees what it used. Repeatable."""

    @property
    def lost(self) -> str:
        """Why it is not living any more; empty while it is."""


@runtime_checkable
class PullsImages(Protocol):
    """What a back-end can do besides if its sandboxes start from images of a registry."""

    async def prefetch(self, images: Sequence[str]) -> list[ImageStatus]:
        """Has images pulled, in this order; tells at once how far each is."""

    async def take_pull(self) -> None:
        """Takes one pull from the budget of all hosts that is kept here.

        Raises:
            QuotaExhausted: it is used up for the given time.
            WrongRequest: it is kept elsewhere.
        """


class Backend(Protocol):
    """A maker of sandboxes."""

    name: str
    idle_bytes: int
    """Memory that an idle sandbox is counted with in the warm pool."""

    async def start(self) -> None:
        """Gets ready; ends what an earlier, killed service left behind.

        Raises:
            IsolationUnavailable: this host cannot isolate sandboxes.
            StartupError: a setting or folder is unusable.
        """

    async def stop(self) -> None:
        """Ends every sandbox and frees everything."""

    def missing_protections(self) -> tuple[str, ...]:
        """Protections that this host cannot give, in words."""

    def missing_environments(self, digests: Sequence[str]) -> list[str]:
        """Which of these environments have to be put first."""

    async def put_environment(self, digest: str, archive: IO[bytes]) -> bool:
        """Stores a tree after verifying its digest; False if it was there."""

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> BackendSandbox:
        """Makes a sandbox from a complete specification."""

    async def remove_snapshot(self, snapshot_id: str) -> None:
        """Removes a snapshot; no sandbox that started from it is left."""

    def limiters(self) -> Sequence[LimiterStatus]:
        """Limiters of the back-end's own, each under the name of its config field."""


@dataclass(frozen=True)
class Recovered:
    """A sandbox that an earlier run of the service made and that still lives."""

    sandbox_id: str
    claim: SandboxClaim
    environment: EnvironmentRef
    sandbox: BackendSandbox


@runtime_checkable
class Reattaching(Protocol):
    """A back-end whose sandboxes can outlive the service."""

    async def reattach(self) -> Sequence[Recovered]:
        """Takes over what an earlier run left; called once, after `start`."""
