"""Writing the bytes of one file in order, where it pays by several threads."""

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

_AHEAD = 4


class Writer:
    """Appends parts to an open file. With threads a part must not change before `finish`."""

    def __init__(self, descriptor: int, *, threads: int) -> None:
        """Write to a file from its start.

        Args:
            descriptor: stays the caller's.
            threads: 0: write where `append` is called.
        """
        self._descriptor = descriptor
        self._pool = ThreadPoolExecutor(threads, "weight-sync-write") if threads else None
        self._pending: deque[Future[None]] = deque()
        self.size_bytes = 0
        """Bytes handed in so far."""

    def append(self, part: memoryview) -> None:
        """Write the next part, or have it written; raises what an earlier one met."""
        offset, self.size_bytes = self.size_bytes, self.size_bytes + part.nbytes
        if self._pool is None:
            self._write(part, offset)
            return
        self._pending.append(self._pool.submit(self._write, part, offset))
        while len(self._pending) > _AHEAD:
            self._pending.popleft().result()

    def finish(self) -> None:
        """Wait until all is written; raise what went wrong."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """End the threads; after it nobody writes to the file."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _write(self, part: memoryview, offset: int) -> None:
        while part.nbytes:
            count = os.pwrite(self._descriptor, part, offset)
            part, offset = part[count:], offset + count
