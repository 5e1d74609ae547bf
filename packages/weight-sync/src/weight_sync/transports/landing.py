"""Where bytes from elsewhere land: a file whose space is there before its bytes are."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from weight_sync.transports.base import no_space


@contextmanager
def landing(into: Path, size_bytes: int) -> Iterator[BinaryIO]:
    """Make a new file of a size and open it; it is deleted if the block fails.

    Raises:
        StoreFull: there is no space for it, known before a byte was moved.
    """
    with into.open("xb") as file:
        try:
            if size_bytes:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
            yield file
        except BaseException as error:
            into.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise no_space(into) from error
            raise
