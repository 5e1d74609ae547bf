"""SandboxService as the maker of attempts' sandboxes."""

from __future__ import annotations

import asyncio
import logging

from sandbox_client.client import Sandbox, SandboxClient
from sandbox_client.types import EnvironmentRef, ExecResult, SandboxLimits
from service_kit.errors import Reason, ServiceError, service_error

from rollout_engine.patience import Patience
from rollout_engine.peers import Task, Tasks

logger = logging.getLogger(__name__)


class SandboxWorkspace:
    """One attempt's sandbox; fulfils `peers.Workspace`."""

    def __init__(self, sandbox: Sandbox, patience: Patience, destroy_timeout_s: float) -> None:
        self._sandbox = sandbox
        self._patience = patience
        self._destroy_timeout_s = destroy_timeout_s
        self._destroyed = False

    async def run(self, command: str, *, timeout_s: float, max_output_bytes: int) -> ExecResult:
        """Run a shell command; never repeated, for it may have run."""
        return await self._sandbox.run(
            command, timeout_s=timeout_s, max_output_bytes=max_output_bytes, merge_stderr=True
        )

    async def diff(self) -> bytes:
        """Compare the work folder with its environment."""
        return await self._patience.call(self._sandbox.diff, "Diff")

    async def destroy(self) -> None:
        """End it; what cannot be ended now is ended by its lease."""
        if self._destroyed:
            return
        self._destroyed = True
        try:
            async with asyncio.timeout(self._destroy_timeout_s):
                await self._sandbox.destroy()
        except (ServiceError, TimeoutError) as error:
            logger.warning(
                "sandbox %s could not be destroyed, its lease will end it: %s",
                self._sandbox.id,
                error,
            )


class SandboxWorkspaces:
    """Fulfils `peers.Workspaces`: puts environments where they are needed, once for each.

    Args:
        client: Its owner has to be this engine's alone.
        tasks: Gives the environments that the service lacks.
        patience: For a service that restarts or is full.
        start_timeout_s: Deadline of making one sandbox.
        destroy_timeout_s: Deadline of ending one.
        life: Names this life of the engine; sandboxes of others are leftovers.

    """

    def __init__(
        self,
        client: SandboxClient,
        tasks: Tasks,
        *,
        patience: Patience,
        start_timeout_s: float,
        destroy_timeout_s: float,
        life: str = "",
    ) -> None:
        self._client = client
        self._life = life
        self._tasks = tasks
        self._patience = patience
        self._start_timeout_s = start_timeout_s
        self._destroy_timeout_s = destroy_timeout_s
        self._put: set[str] = set()
        self._putting: dict[str, asyncio.Lock] = {}

    async def create(self, task: Task, key: str) -> SandboxWorkspace:
        """Make a sandbox of the task's environment; the same key gives the same sandbox."""
        sandbox = await self._patience.call(lambda: self._create(task, key), "CreateSandbox")
        workspace = SandboxWorkspace(sandbox, self._patience, self._destroy_timeout_s)
        if task.environment.forget_history:
            try:
                await sandbox.forget_history(timeout_s=self._start_timeout_s)
            except BaseException:
                await workspace.destroy()
                raise
        return workspace

    async def destroy_leftovers(self) -> int:
        """Destroy what an earlier life of this engine left behind; how many there were."""
        living = await self._patience.call(self._client.list, "ListSandboxes")
        leftovers = [info for info in living if info.labels.get("life") != self._life]
        for info in leftovers:
            await self._client.destroy(info.sandbox_id)
        return len(leftovers)

    async def _create(self, task: Task, key: str) -> Sandbox:
        recipe = task.environment
        reference = _reference(task)
        limits = SandboxLimits(
            memory_bytes=recipe.memory_bytes, cpus=recipe.cpus, network=recipe.network
        )
        digest = reference.tree_digest
        if digest and digest not in self._put:
            await self._put_environment(digest)
        for last in (False, True):
            try:
                return await self._client.create(
                    reference,
                    key=key,
                    limits=limits,
                    labels={"task": task.task_id, "life": self._life},
                    timeout_s=self._start_timeout_s,
                )
            except ServiceError as error:
                if last or error.reason is not Reason.ENVIRONMENT_UNKNOWN or not digest:
                    raise
                # The service lost its store, or dropped what was not used for long.
                self._put.discard(digest)
                await self._put_environment(digest)
        raise AssertionError("the second try returns or raises")

    async def _put_environment(self, digest: str) -> None:
        async with self._putting.setdefault(digest, asyncio.Lock()):
            try:
                if digest not in self._put:
                    if await self._client.missing_environments([digest]):
                        archive = await self._tasks.environment(digest)
                        await self._client.put_environment_tar(digest, archive)
                    self._put.add(digest)
            finally:
                self._putting.pop(digest, None)


def _reference(task: Task) -> EnvironmentRef:
    recipe = task.environment
    if recipe.dockerfile:
        raise service_error(
            Reason.ENVIRONMENT_UNKNOWN,
            f"task {task.task_id} starts from a Dockerfile, which this engine does not build; "
            "give the task an image or a folder tree",
        )
    options = {"workdir": recipe.workdir} if recipe.workdir else {}
    if recipe.image:
        return EnvironmentRef(image=recipe.image, env=recipe.env, **options)
    return EnvironmentRef(tree_digest=recipe.digest, env=recipe.env, **options)


__all__ = ["SandboxWorkspace", "SandboxWorkspaces"]
