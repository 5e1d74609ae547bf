"""One sandbox at E2B, seen from the service."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

from e2b import AsyncSandbox

from sandbox_client.backends.base import ExecHooks
from sandbox_client.backends.e2b.config import E2BConfig
from sandbox_client.backends.e2b.errors import sdk_errors
from sandbox_client.backends.e2b.files import SandboxFiles
from sandbox_client.backends.e2b.guest import Guest
from sandbox_client.backends.e2b.running import CommandRunner
from sandbox_client.backends.e2b.snapshots import SnapshotShelf
from sandbox_client.backends.e2b.trees import StoredTree
from sandbox_client.errors import SandboxGone
from sandbox_client.types import Command, ExecResult, FileContent

__all__ = ["E2BSandbox"]

logger = logging.getLogger(__name__)


class E2BSandbox:
    """A living sandbox; see `BackendSandbox`. `forget` takes it out of the back-end's tables."""

    def __init__(
        self,
        remote: AsyncSandbox,
        config: E2BConfig,
        *,
        workdir: str,
        environ: Mapping[str, str],
        kill_grace_s: float,
        limit_bytes: int,
        before: StoredTree,
        snapshots: SnapshotShelf,
        forget: Callable[[], None],
    ) -> None:
        self.remote = remote
        self.lost = ""
        """Why it is not living any more; empty while it is."""
        self._before = before
        self._snapshots = snapshots
        self._forget = forget
        self._guest = Guest(remote, config, limit_bytes)
        self._files = SandboxFiles(self._guest, workdir, config)
        self._runner = CommandRunner(
            remote, config, workdir=workdir, environ=environ, kill_grace_s=kill_grace_s
        )
        self._destroyed: asyncio.Future[None] | None = None

    @property
    def remote_id(self) -> str:
        """Its id at E2B."""
        return str(self.remote.sandbox_id)

    def lose(self, why: str) -> None:
        """Notes that it is not living any more."""
        self.lost = self.lost or why

    async def run(self, command: Command, hooks: ExecHooks) -> ExecResult:
        """Runs one command to its end."""
        with self._living():
            return await self._runner.run(command, hooks)

    async def write_files(self, files: Sequence[FileContent]) -> None:
        """Writes small files."""
        with self._living():
            await self._files.write(files)

    async def read_file(self, path: str, max_bytes: int) -> IO[bytes]:
        """A file's content, fetched whole."""
        with self._living():
            return await self._files.read(path, max_bytes)

    async def upload_tree(self, archive: IO[bytes], path: str) -> None:
        """Unpacks a tar into a folder."""
        with self._living():
            await self._files.unpack(archive, path)

    async def download_tree(self, path: str, out: IO[bytes]) -> None:
        """Packs a folder into a tar."""
        with self._living():
            await self._files.pack(path, out)

    async def diff(self, max_bytes: int) -> bytes:
        """The work folder against what it started from."""
        with self._living():
            return await self._files.diff(self._before, max_bytes)

    async def apply_patch(self, patch: bytes) -> list[str]:
        """Applies a git-format diff to the work folder, all of it or nothing."""
        with self._living():
            return await self._files.apply(patch)

    async def snapshot(self, snapshot_id: str) -> int:
        """Keeps its files under this id; E2B does not tell their size, so that is 0."""
        with self._living():
            await self._snapshots.make(self.remote, snapshot_id)
        return 0

    async def destroy(self) -> None:
        """Ends it at E2B. Repeatable."""
        if self._destroyed is not None:
            await asyncio.shield(self._destroyed)
            return
        self._destroyed = asyncio.get_running_loop().create_future()
        self.lose("it was destroyed")
        try:
            with sdk_errors(f"ending sandbox {self.remote_id}"):
                await self.remote.kill()
            await self._runner.close()
        finally:
            self._forget()
            self._destroyed.set_result(None)

    @contextmanager
    def _living(self) -> Iterator[None]:
        if self.lost:
            raise SandboxGone(f"the sandbox is gone: {self.lost}")
        try:
            yield
        except SandboxGone as error:
            self.lose(error.message)
            raise
