"""Files for what is on its way to a sandbox or from one."""

import contextlib
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import IO

from sandbox_client.core.limits import LimiterStatus
from sandbox_client.limiter import Quota

__all__ = ["SPOOL_BYTES", "Spool"]

SPOOL_BYTES = 1 << 20
"""What one of them may take in memory; with more it goes to disk."""


class Spool:
    """Temporary files of one folder, which together hold no more than a quota."""

    def __init__(self, folder: Path, quota: Quota) -> None:
        self._folder = folder
        self._quota = quota

    @contextlib.contextmanager
    def file(self) -> Iterator[tuple[IO[bytes], Callable[[int], None]]]:
        """A file, and what has to be told how many bytes are written to it.

        Raises:
            QuotaExhausted: from telling, when there is no room for them.
        """
        with (
            self._quota.share() as take,
            tempfile.SpooledTemporaryFile(SPOOL_BYTES, dir=str(self._folder)) as file,
        ):
            yield file, take

    @contextlib.asynccontextmanager
    async def collected(self, parts: AsyncIterator[bytes]) -> AsyncIterator[IO[bytes]]:
        """All parts in one file, at its start.

        Raises:
            QuotaExhausted: there is no room for them.
        """
        with self.file() as (file, take):
            async for part in parts:
                take(len(part))
                file.write(part)
            file.seek(0)
            yield file

    @contextlib.contextmanager
    def counted(self, parts: AsyncIterator[bytes]) -> Iterator[AsyncGenerator[bytes, None]]:
        """The parts for somebody else to keep until the end; errors as `collected`."""
        with self._quota.share() as take:

            async def counting() -> AsyncGenerator[bytes, None]:
                async for part in parts:
                    take(len(part))
                    yield part

            yield counting()

    def status(self) -> LimiterStatus:
        """How much is on its way."""
        return self._quota.status()
