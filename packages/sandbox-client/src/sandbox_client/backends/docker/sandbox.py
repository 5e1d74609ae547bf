"""One container, seen from the service."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from sandbox_client.backends.base import ExecHooks
from sandbox_client.backends.docker.cgroups import find_cgroups
from sandbox_client.backends.docker.engine import Engine
from sandbox_client.backends.docker.mounts import SandboxMounts
from sandbox_client.backends.docker.processes import is_ending
from sandbox_client.backends.docker.running import ContainerSettings, DockerCommands
from sandbox_client.backends.local.files import SandboxFiles
from sandbox_client.backends.local.users import Ids
from sandbox_client.backends.on_host import SandboxOnHost
from sandbox_client.backends.running import CommandRunner
from sandbox_client.backends.setup import check_user
from sandbox_client.errors import SandboxGone, SandboxUnavailable
from sandbox_client.types import Command, ExecResult

__all__ = ["DockerSandbox", "SandboxSettings"]


@dataclass(frozen=True)
class SandboxSettings:
    """What the back-end decides for a sandbox."""

    sandbox_id: str
    user: str
    commands: ContainerSettings
    mounts: SandboxMounts
    kill_grace_s: float
    ids: Ids
    diff_exclude: tuple[str, ...]
    max_patched_bytes: int


class DockerSandbox(SandboxOnHost):
    """A living sandbox; see `BackendSandbox`.

    Args:
        engine: the daemon.
        settings: its own.
        pid: the container's first process, as this host sees it.
        keep: copies its upper layer and writable folders.
        end: removes the container and the mounts.

    Raises:
        SandboxUnavailable: the container is gone already, or this service cannot look into it.
    """

    def __init__(
        self,
        engine: Engine,
        settings: SandboxSettings,
        pid: int,
        keep: Callable[[str, int, Sequence[int]], Awaitable[int]],
        end: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(
            settings.diff_exclude,
            settings.mounts.origin.writable,
            keep,
            opaque_mark=settings.ids.opaque_mark,
        )
        self._settings = settings
        self._pid = pid
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._cause = "other"
        self._destroyed: asyncio.Future[None] | None = None
        try:
            self._pid_fd = os.pidfd_open(pid)
        except OSError as error:
            raise SandboxUnavailable(f"the container ended at once: {error}") from error
        try:
            self._commands = DockerCommands(
                engine, settings.commands, find_cgroups(pid), self._gone, self._look_after
            )
            self._open_files(pid)
        except OSError as error:
            os.close(self._pid_fd)
            raise SandboxUnavailable(f"the container cannot be looked into: {error}") from error
        self._runner = CommandRunner(self._commands, kill_grace_s=settings.kill_grace_s)
        self._loop.add_reader(self._pid_fd, self._container_ended)

    @property
    def lost(self) -> str:
        """Why it is not living any more; empty while it is."""
        return self._commands.lost

    def require_living(self) -> None:
        """Raises `SandboxGone` if it is not living."""
        self._commands.require_living()

    async def run(self, command: Command, hooks: ExecHooks) -> ExecResult:
        """Runs one command to its end."""
        settings = self._settings
        check_user("docker", settings.user, settings.commands.uid, command.user)
        return await self._runner.run(command, hooks)

    async def destroy(self) -> None:
        """Ends everything in it and frees what it used."""
        if self._destroyed is not None:
            await asyncio.shield(self._destroyed)
            return
        self._destroyed = self._loop.create_future()
        try:
            self._lose("it was destroyed")
            self._detach()
            await self._end()
        finally:
            self._runner.close()
            self._destroyed.set_result(None)

    def _open_files(self, pid: int) -> None:
        commands, mounts = self._settings.commands, self._settings.mounts
        root_fd = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            files = SandboxFiles(
                root_fd,
                commands.workdir,
                uid=commands.uid,
                gid=commands.gid,
                max_patched_bytes=self._settings.max_patched_bytes,
            )
        except BaseException:
            os.close(root_fd)
            raise
        if files.work_device != mounts.work.stat().st_dev:
            files.close()
            raise OSError(
                "its work folder is not the one made for it; the service and the daemon have to "
                "share one mount namespace and one pid namespace"
            )
        upper_fd = os.open(mounts.upper, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._attach(files, upper_fd, mounts.lower)

    def _look_after(self) -> None:
        if self._pid_fd >= 0 and is_ending(self._pid):
            self._container_ended()

    def _container_ended(self) -> None:
        self._lose("its container ended")

    def _lose(self, why: str) -> None:
        if self._pid_fd < 0:
            return
        self._loop.remove_reader(self._pid_fd)
        os.close(self._pid_fd)
        self._pid_fd = -1
        if self._commands.new_oom_kills():
            self._cause = "memory_limit"
            why += "; its memory limit was reached"
        self._commands.lose(why)

    def _gone(self) -> SandboxGone:
        return SandboxGone(
            f"sandbox {self._settings.sandbox_id} is gone: {self.lost}",
            metadata={"cause": self._cause},
        )
