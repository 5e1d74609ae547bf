"""What grading needs of a sandbox service, and the real one behind it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from swe_eval.tasks.task import Environment, FileTree


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
    """How a command in a sandbox ended, and its bounded output."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    out_of_memory: bool = False


class SandboxHost(Protocol):
    """Creates fresh sandboxes. Every method raises `ServiceError` when infrastructure fails."""

    async def create(self, environment: Environment) -> str:
        """Starts a sandbox from the pristine environment and returns its id."""
        ...

    async def apply_patch(self, sandbox_id: str, patch: bytes) -> list[str]:
        """Applies a git-format diff and returns the paths it changed.

        Raises:
            ServiceError: reason PATCH_REJECTED when it does not apply.
        """
        ...

    async def diff(self, sandbox_id: str) -> bytes:
        """What was changed in the work folder, in git's format."""
        ...

    async def write_files(self, sandbox_id: str, folder: str, files: FileTree) -> None:
        """Writes files under an absolute folder."""
        ...

    async def run(
        self,
        sandbox_id: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float,
        max_output_bytes: int,
    ) -> CommandResult:
        """Runs one command in the work folder to its end."""
        ...

    async def destroy(self, sandbox_id: str) -> None:
        """Ends a sandbox."""
        ...
