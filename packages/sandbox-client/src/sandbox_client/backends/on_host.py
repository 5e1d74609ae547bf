"""The files of a sandbox on this host, worked on through descriptors: nothing inside takes part."""

import asyncio
import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TypeVar

from sandbox_client.backends.ends import to_its_end
from sandbox_client.backends.local.files import SandboxFiles
from sandbox_client.backends.local.work_diff import work_diff
from sandbox_client.core.patch import PatchError, apply_patch
from sandbox_client.errors import PatchRejected, TooLarge
from sandbox_client.types import FileContent

__all__ = ["SandboxOnHost"]

_T = TypeVar("_T")
_SMALL_FILES_BYTES = 256 * 1024
_SMALL_PATCH_BYTES = 64 * 1024
_FEW_FILES = 64


class SandboxOnHost(ABC):
    """The file half of a `BackendSandbox` whose root and work folder this host can open.

    Args:
        diff_exclude: names that a diff leaves out.
        writable: its writable folders beside the work folder.
        keep: copies an upper layer and those folders for a snapshot; see `SnapshotLayers.keep`.
        opaque_mark: as of `Ids`.
    """

    def __init__(
        self,
        diff_exclude: Sequence[str],
        writable: Sequence[str],
        keep: Callable[[str, int, Sequence[int]], Awaitable[int]],
        *,
        opaque_mark: str,
    ) -> None:
        self._diff_exclude = diff_exclude
        self._writable = writable
        self._keep = keep
        self._opaque_mark = opaque_mark
        self._files: SandboxFiles | None = None
        self._upper_fd = -1
        self._lower = Path()
        self._in_use = 0
        self._detaching = False

    @abstractmethod
    def require_living(self) -> None:
        """Raises `SandboxGone` if the sandbox is not living."""

    def _attach(self, files: SandboxFiles, upper_fd: int, lower: Path) -> None:
        """Gives it its files; both descriptors are its own from now on.

        Args:
            files: access with the sandbox user's rights.
            upper_fd: the upper layer of the work folder's overlay.
            lower: the environment's folder.
        """
        self._files, self._upper_fd, self._lower = files, upper_fd, lower

    def _detach(self) -> None:
        """Lets go of the files, once the calls that work with them have ended."""
        self._detaching = True
        if self._in_use == 0:
            self._release()

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

        def compute() -> bytes:
            return work_diff(
                self._upper_fd,
                self._lower,
                exclude=self._diff_exclude,
                max_bytes=max_bytes,
                opaque_mark=self._opaque_mark,
            )

        with self._using():
            return compute() if self._wrote_little() else await _in_thread(compute)

    async def apply_patch(self, patch: bytes) -> list[str]:
        """Applies a git-format diff to the work folder, all of it or nothing."""
        with self._using() as access:
            if len(patch) <= _SMALL_PATCH_BYTES:
                return _apply(patch, access)
            return await _in_thread(lambda: _apply(patch, access))

    async def snapshot(self, snapshot_id: str) -> int:
        """Keeps its files as layers for its forks."""
        with self._using() as access, contextlib.ExitStack() as folders:
            mounts = [access.folder_fd(path) for path in self._writable]
            for fd in mounts:
                folders.callback(os.close, fd)
            return await self._keep(snapshot_id, self._upper_fd, mounts)

    def _wrote_little(self) -> bool:
        """Whether so little was written that looking at it takes no time worth a thread."""
        used = os.fstatvfs(self._upper_fd)
        size = (used.f_blocks - used.f_bfree) * used.f_frsize
        return used.f_files - used.f_ffree <= _FEW_FILES and size <= _SMALL_FILES_BYTES

    @contextlib.contextmanager
    def _using(self) -> Iterator[SandboxFiles]:
        """Keeps the descriptors open while a call works with them."""
        self.require_living()
        access = self._files
        assert access is not None, "a sandbox is used only once it is ready"
        self._in_use += 1
        try:
            yield access
        finally:
            self._in_use -= 1
            if self._in_use == 0 and self._detaching:
                self._release()

    def _release(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None
            os.close(self._upper_fd)


def _apply(patch: bytes, access: SandboxFiles) -> list[str]:
    try:
        changed = apply_patch(patch, access.state)
    except (PatchError, OSError) as error:
        # A file's name may be no text, and then neither is an error that names it.
        text = str(error).encode(errors="backslashreplace").decode()
        raise PatchRejected(f"the patch does not apply: {text}") from error
    try:
        for path, state in changed.items():
            access.set_state(path, state)
    except OSError as error:
        raise PatchRejected(f"the patch fits but could not be written whole: {error}") from error
    return sorted(changed)


async def _in_thread(work: Callable[[], _T]) -> _T:
    return await to_its_end(asyncio.to_thread(work))
