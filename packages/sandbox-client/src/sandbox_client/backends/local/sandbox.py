"""One local sandbox, seen from the service."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from sandbox_client.backends.base import ExecHooks
from sandbox_client.backends.local.cgroups import SandboxCgroup
from sandbox_client.backends.local.files import SandboxFiles
from sandbox_client.backends.local.init_channel import InitChannel
from sandbox_client.backends.local.running import CommandRunner
from sandbox_client.backends.local.work_diff import work_diff
from sandbox_client.core.patch import PatchError, apply_patch
from sandbox_client.errors import PatchRejected, TooLarge
from sandbox_client.types import Command, ExecResult, FileContent

__all__ = ["LocalSandbox", "SandboxSettings"]

_T = TypeVar("_T")
_SMALL_FILES_BYTES = 256 * 1024
_SMALL_PATCH_BYTES = 64 * 1024
_FEW_FILES = 64


@dataclass(frozen=True)
class SandboxSettings:
    """What the back-end decides for a sandbox."""

    sandbox_id: str
    workdir: str
    lower: Path
    environ: dict[str, str]
    uid: int
    gid: int
    kill_grace_s: float
    diff_exclude: tuple[str, ...]


class LocalSandbox:
    """A living sandbox; see `BackendSandbox`. `end` makes the back-end end its processes."""

    def __init__(
        self,
        settings: SandboxSettings,
        channel: socket.socket,
        cgroup: SandboxCgroup,
        end: Callable[[], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._channel = InitChannel(channel, settings.sandbox_id, cgroup.new_oom_kills)
        self._runner = CommandRunner(
            self._channel,
            cgroup,
            workdir=settings.workdir,
            environ=settings.environ,
            kill_grace_s=settings.kill_grace_s,
        )
        self._end = end
        self._files: SandboxFiles | None = None
        self._upper_fd = -1
        self._in_use = 0
        self._destroyed: asyncio.Future[None] | None = None

    @property
    def lost(self) -> str:
        """Why it is not living any more; empty while it is."""
        return self._channel.lost

    async def wait_ready(self) -> None:
        """Returns when its first process has set everything up."""
        root_fd, self._upper_fd = await self._channel.ready
        settings = self._settings
        self._files = SandboxFiles(root_fd, settings.workdir, uid=settings.uid, gid=settings.gid)

    def fail(self, why: str) -> None:
        """Tells that its first process never came to be."""
        self._channel.lose(why)

    async def run(self, command: Command, hooks: ExecHooks) -> ExecResult:
        """Runs one command to its end."""
        return await self._runner.run(command, hooks)

    # -- files

    async def write_files(self, files: Sequence[FileContent]) -> None:
        """Writes files; big ones in a thread."""
        with self._using() as access:

            def write() -> None:
                for file in files:
                    access.write(file.path, file.content, file.mode)

            if sum(len(file.content) for file in files) <= _SMALL_FILES_BYTES:
                write()
            else:
                await _in_thread(write)

    async def read_file(self, path: str, max_bytes: int) -> IO[bytes]:
        """Opens a file for reading."""
        with self._using() as access:
            file = access.open_for_reading(path)
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            file.close()
            raise TooLarge(f"{path!r} has {size} bytes, at most {max_bytes} may be read")
        return file

    async def upload_tree(self, archive: IO[bytes], path: str) -> None:
        """Unpacks a tar into a folder."""
        with self._using() as access:
            await _in_thread(lambda: access.extract(archive, path))

    async def download_tree(self, path: str, out: IO[bytes]) -> None:
        """Packs a folder into a tar."""
        with self._using() as access:
            await _in_thread(lambda: access.archive(path, out))

    async def diff(self, max_bytes: int) -> bytes:
        """The work folder against its environment."""
        settings = self._settings

        def compute() -> bytes:
            return work_diff(
                self._upper_fd, settings.lower, exclude=settings.diff_exclude, max_bytes=max_bytes
            )

        with self._using():
            return compute() if self._wrote_little() else await _in_thread(compute)

    async def apply_patch(self, patch: bytes) -> list[str]:
        """Applies a git-format diff to the work folder, all of it or nothing."""
        with self._using() as access:
            if len(patch) <= _SMALL_PATCH_BYTES:
                return _apply(patch, access)
            return await _in_thread(lambda: _apply(patch, access))

    def _wrote_little(self) -> bool:
        """Whether so little was written that looking at it takes no time worth a thread."""
        used = os.fstatvfs(self._upper_fd)
        size = (used.f_blocks - used.f_bfree) * used.f_frsize
        return used.f_files - used.f_ffree <= _FEW_FILES and size <= _SMALL_FILES_BYTES

    @contextlib.contextmanager
    def _using(self) -> Iterator[SandboxFiles]:
        """Keeps the descriptors open while a call works with them."""
        self._channel.require_living()
        access = self._files
        assert access is not None, "a sandbox is used only once it is ready"
        self._in_use += 1
        try:
            yield access
        finally:
            self._in_use -= 1
            if self._in_use == 0 and self._destroyed is not None:
                self._release()

    # -- end

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
            if self._in_use == 0:
                self._release()
            self._destroyed.set_result(None)

    def _release(self) -> None:
        ready = self._channel.ready
        if self._files is not None:
            self._files.close()
            self._files = None
            os.close(self._upper_fd)
        elif ready.done() and not ready.cancelled() and ready.exception() is None:
            # It came up, but nobody waited for it any more.
            for fd in ready.result():
                os.close(fd)


def _apply(patch: bytes, access: SandboxFiles) -> list[str]:
    try:
        changed = apply_patch(patch, access.state)
    except (PatchError, OSError) as error:
        raise PatchRejected(f"the patch does not apply: {error}") from error
    try:
        for path, state in changed.items():
            access.set_state(path, state)
    except OSError as error:
        raise PatchRejected(f"the patch fits but could not be written whole: {error}") from error
    return sorted(changed)


async def _in_thread(work: Callable[[], _T]) -> _T:
    """Runs blocking work to its end, even if the caller goes away meanwhile."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
