"""Files for what is on its way to a sandbox or from one."""

import contextlib
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import IO

from sandbox_client.core.limits import LimiterStatus
from sandbox_client.errors import TooLarge
from sandbox_client.limiter import Quota

__all__ = ["SPOOL_BYTES", "Spool"]

SPOOL_BYTES = 1 << 20
"""What one of them may take in memory; with more it goes to disk."""


class _BoundedFile(tempfile.SpooledTemporaryFile[bytes]):
    """A temporary file that takes only so much."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        super().__init__(SPOOL_BYTES, dir=str(folder))
        self._max_bytes = max_bytes

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Writes, or raises `TooLarge`."""
        # Before, not after: a sandbox's sparse files are of any size and take nothing of its disk.
        if self.tell() + len(data) > self._max_bytes:
            raise TooLarge(f"more than {self._max_bytes} bytes in one call (limits.upload_bytes)")
        return super().write(data)


class Spool:
    """Temporary files of one folder, which together hold no more than a quota.

    Args:
        folder: where they are made.
        quota: what they share.
        max_bytes: what each of them takes at most.
    """

    def __init__(self, folder: Path, quota: Quota, max_bytes: int) -> None:
        self._folder = folder
        self._quota = quota
        self._max_bytes = max_bytes

    @contextlib.contextmanager
    def file(self) -> Iterator[tuple[IO[bytes], Callable[[int], None]]]:
        """A file, and what has to be told how many bytes are written to it.

        Raises:
            QuotaExhausted: from telling, when there is no room for them.
            TooLarge: from writing, more than a file may take.
        """
        with (
            self._quota.share() as take,
            _BoundedFile(self._folder, self._max_bytes) as file,
        ):
            yield file, take

    @contextlib.asynccontextmanager
    async def collected(self, parts: AsyncIterator[bytes]) -> AsyncIterator[IO[bytes]]:
        """All parts in one file, at its start.

        Raises:
            QuotaExhausted: there is no room for them.
            TooLarge: they are more than a file may take.
        """
        with self.file() as (file, take):
            async for part in parts:
                take(len(part))
                file.write(part)
            file.seek(0)
            yield file

    @contextlib.contextmanager
    def counted(self, parts: AsyncIterator[bytes]) -> Iterator[AsyncGenerator[bytes, None]]:
        """The parts for somebody else to keep until the end; `QuotaExhausted` as above."""
        with self._quota.share() as take:

            async def counting() -> AsyncGenerator[bytes, None]:
                async for part in parts:
                    take(len(part))
                    yield part

            yield counting()

    def status(self) -> LimiterStatus:
        """How much is on its way."""
        return self._quota.status()
