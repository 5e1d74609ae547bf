"""The sandbox service as grading uses it."""

from collections.abc import Mapping, Sequence

from sandbox_client import (
    Command,
    EnvironmentRef,
    EnvironmentUnknown,
    FileContent,
    Sandbox,
    SandboxClient,
    SandboxLimits,
    WrongRequest,
)
from service_kit.errors import FailedPrecondition

from swe_eval.grading.faults import FAULT_CAUSE_KEY
from swe_eval.grading.host import CommandResult
from swe_eval.tasks.task import Environment, EnvironmentSource, FileTree


class ServiceHost:
    """A `SandboxHost` on a `sandbox_client.SandboxClient`, which renews the leases meanwhile.

    Args:
        client: An open client.
        start_timeout_s: Longest time for a sandbox to start, waiting for room included.
    """

    def __init__(self, client: SandboxClient, *, start_timeout_s: float) -> None:
        self._client = client
        self._start_timeout_s = start_timeout_s
        self._sandboxes: dict[str, Sandbox] = {}

    async def create(self, environment: Environment) -> str:
        """Starts a sandbox; stores the environment first if the service lacks it."""
        reference = _reference(environment)
        limits = SandboxLimits(
            memory_bytes=environment.memory_bytes,
            cpus=environment.cpus,
            network=environment.network,
        )
        try:
            try:
                sandbox = await self._create(reference, limits)
            except EnvironmentUnknown:
                await self._client.put_environment(environment.tree)
                sandbox = await self._create(reference, limits)
        except WrongRequest as error:
            # What a task asks for and this service can't give: an image, or the network.
            raise FailedPrecondition(
                f"this sandbox service can't make the task's environment: {error.message}",
                metadata={FAULT_CAUSE_KEY: "IMAGE"},
            ) from error
        if environment.forget_history:
            await self._forget_history(sandbox)
        self._sandboxes[sandbox.id] = sandbox
        return sandbox.id

    async def _forget_history(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.forget_history(timeout_s=self._start_timeout_s)
        except BaseException:
            await sandbox.destroy()
            raise

    async def _create(self, reference: EnvironmentRef, limits: SandboxLimits) -> Sandbox:
        return await self._client.create(
            reference,
            limits=limits,
            labels={"purpose": "grading"},
            timeout_s=self._start_timeout_s,
        )

    async def apply_patch(self, sandbox_id: str, patch: bytes) -> list[str]:
        """Applies a git-format diff and returns the paths it changed."""
        return await self._sandboxes[sandbox_id].apply_patch(patch)

    async def diff(self, sandbox_id: str) -> bytes:
        """What was changed in the work folder, in git's format."""
        return await self._sandboxes[sandbox_id].diff()

    async def write_files(self, sandbox_id: str, folder: str, files: FileTree) -> None:
        """Writes files under an absolute folder."""
        await self._sandboxes[sandbox_id].write_files(
            [
                FileContent(f"{folder}/{path}", file.content, 0o755 if file.executable else 0o644)
                for path, file in files.items()
            ]
        )

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
        result = await self._sandboxes[sandbox_id].run(
            Command(
                argv=tuple(argv), env=env, timeout_s=timeout_s, max_output_bytes=max_output_bytes
            )
        )
        return CommandResult(
            exit_code=result.exit_code,
            stdout=result.stdout_bytes,
            stderr=result.stderr_bytes,
            timed_out=result.timed_out,
            out_of_memory=result.out_of_memory,
        )

    async def destroy(self, sandbox_id: str) -> None:
        """Ends a sandbox."""
        await self._sandboxes.pop(sandbox_id).destroy()


def _reference(environment: Environment) -> EnvironmentRef:
    if environment.source is EnvironmentSource.TREE:
        return EnvironmentRef(
            tree_digest=environment.digest, workdir=environment.workdir, env=environment.env
        )
    if environment.source is EnvironmentSource.IMAGE:
        return EnvironmentRef(
            image=environment.image, workdir=environment.workdir, env=environment.env
        )
    raise FailedPrecondition(
        "the task's environment is a Dockerfile that has to be built first; build it and name the "
        "image in environment.docker_image, or set environment = 'tree' for its task set",
        metadata={FAULT_CAUSE_KEY: "IMAGE"},
    )
