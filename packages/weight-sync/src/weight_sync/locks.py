"""Folders that one process has to itself."""

import fcntl
from pathlib import Path
from typing import IO

from service_kit.errors import StartupError


def exclusive(path: Path, advice: str) -> IO[str]:
    """Take a lock file for this process's life, or until the returned file is closed.

    The kernel frees it when the process dies, however it dies.

    Raises:
        StartupError: another process has it; `advice` says what to do.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("w", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise StartupError(f"{path.parent} is in use by another process; {advice}") from error
    return file
