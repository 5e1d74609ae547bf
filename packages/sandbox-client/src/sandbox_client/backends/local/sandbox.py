"""One local sandbox, seen from the service."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox_client.backends.base import ExecHooks
from sandbox_client.backends.local.cgroups import SandboxCgroup
from sandbox_client.backends.local.files import SandboxFiles
from sandbox_client.backends.local.init_channel import InitChannel
from sandbox_client.backends.local.running import LocalCommands
from sandbox_client.backends.local.users import Ids
from sandbox_client.backends.on_host import SandboxOnHost
from sandbox_client.backends.running import CommandRunner
from sandbox_client.backends.setup import check_user
from sandbox_client.types import Command, ExecResult

__all__ = ["LocalSandbox", "SandboxSettings"]


@dataclass(frozen=True)
class SandboxSettings:
    """What the back-end decides for a sandbox."""

    sandbox_id: str
    workdir: str
    lower: Path
    """The environment's folder, if there is no snapshot on top of it."""
    writable: tuple[str, ...]
    environ: dict[str, str]
    user: str
    uid: int
    """What commands see as theirs; `ids` are what the service sees."""
    ids: Ids
    kill_grace_s: float
    diff_exclude: tuple[str, ...]
    max_patched_bytes: int


class LocalSandbox(SandboxOnHost):
    """A living sandbox; see `BackendSandbox`.

    `keep` makes the back-end copy its upper layer and writable folders, `end` end its processes.
    """

    def __init__(
        self,
        settings: SandboxSettings,
        channel: socket.socket,
        cgroup: SandboxCgroup,
        keep: Callable[[str, int, Sequence[int]], Awaitable[int]],
        end: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(
            settings.diff_exclude,
            settings.writable,
            keep,
            opaque_mark=settings.ids.opaque_mark,
        )
        self._settings = settings
        self._channel = InitChannel(channel, settings.sandbox_id, cgroup.new_oom_kills)
        commands = LocalCommands(
            self._channel, cgroup, workdir=settings.workdir, environ=settings.environ
        )
        self._runner = CommandRunner(commands, kill_grace_s=settings.kill_grace_s)
        self._end = end
        self._view_fd = -1
        self._destroyed: asyncio.Future[None] | None = None

    @property
    def lost(self) -> str:
        """Why it is not living any more; empty while it is."""
        return self._channel.lost

    def require_living(self) -> None:
        """Raises `SandboxGone` if it is not living."""
        self._channel.require_living()

    async def wait_ready(self) -> None:
        """Returns when its first process has set everything up."""
        root_fd, upper_fd, *view = await self._channel.ready
        settings = self._settings
        files = SandboxFiles(
            root_fd,
            settings.workdir,
            uid=settings.ids.uid,
            gid=settings.ids.gid,
            max_patched_bytes=settings.max_patched_bytes,
        )
        lower = settings.lower
        for self._view_fd in view:
            # Snapshots and environment as one folder: it can be reached by this descriptor alone.
            lower = Path(f"/proc/self/fd/{self._view_fd}")
        self._attach(files, upper_fd, lower)

    def fail(self, why: str) -> None:
        """Tells that its first process never came to be."""
        self._channel.lose(why)

    async def run(self, command: Command, hooks: ExecHooks) -> ExecResult:
        """Runs one command to its end."""
        check_user("local", self._settings.user, self._settings.uid, command.user)
        return await self._runner.run(command, hooks)

    async def destroy(self) -> None:
        """Ends everything in it and frees what it used."""
        if self._destroyed is not None:
            await asyncio.shield(self._destroyed)
            return
        self._destroyed = asyncio.get_running_loop().create_future()
        try:
            self._channel.lose("it was destroyed")
            await self._end()
        finally:
            self._runner.close()
            self._let_go()
            self._destroyed.set_result(None)

    def _release(self) -> None:
        super()._release()
        if self._view_fd >= 0:
            os.close(self._view_fd)
            self._view_fd = -1

    def _let_go(self) -> None:
        ready = self._channel.ready
        if self._files is not None:
            self._detach()
        elif ready.done() and not ready.cancelled() and ready.exception() is None:
            # It came up, but nobody waited for it any more.
            for fd in ready.result():
                os.close(fd)
