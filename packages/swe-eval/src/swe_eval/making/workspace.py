"""Puts folders back as they were: the repository's, and those where its tests may leave things.

Uploaded into the sandbox beside `warm`: it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Workspace", "remove"]

_Seen = tuple[int, int, int, int]


@dataclass
class _Entry:
    seen: _Seen
    content: bytes | str | None
    """Of a file its bytes, of a link its target, of a folder nothing."""


class Workspace:
    """Folders as they were at the start.

    Args:
        folder: The repository's.
        outside: Others; those that are not there or can't be written are left alone, and so are
            links to one that is.
        keep: A folder below one of these that is left alone.
    """

    def __init__(self, folder: str, outside: Iterable[str] = (), keep: str = "") -> None:
        self.folder = folder
        self._keep = keep
        self._roots = [os.path.realpath(folder)]
        for path in sorted({os.path.realpath(path) for path in outside}):
            within = any((path + "/").startswith(root.rstrip("/") + "/") for root in self._roots)
            if path != "/" and not within and os.path.isdir(path) and os.access(path, os.W_OK):  # noqa: PTH112
                self._roots.append(path)
        self._below: dict[str, dict[str, _Entry]] = {}
        self._modes: dict[str, int] = {}
        for root in self._roots:
            self._look(root)

    def put(self, path: str, source: str) -> None:
        """Writes a source into the repository's folder."""
        with open(os.path.join(self.folder, path), "wb") as file:  # noqa: PTH118, PTH123
            file.write(source.encode())

    def restore(self) -> None:
        """Undoes every change to files, folders and links, by whoever; a `lstat` for each."""
        for root in self._roots:
            self._put_back(root)

    def _look(self, folder: str) -> None:
        entries = self._below[folder] = {}
        self._modes[folder] = os.lstat(folder).st_mode
        for name in self._names(folder):
            path = os.path.join(folder, name)  # noqa: PTH118
            status = os.lstat(path)
            content: bytes | str | None = None
            if stat.S_ISREG(status.st_mode):
                with open(path, "rb") as file:  # noqa: PTH123
                    content = file.read()
            elif stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)  # noqa: PTH115
            elif stat.S_ISDIR(status.st_mode):
                self._look(path)
            entries[name] = _Entry(_seen(status), content)

    def _names(self, folder: str) -> list[str]:
        # What Python has compiled is valid by its source's content.
        return [
            name
            for name in os.listdir(folder)  # noqa: PTH208
            if name != "__pycache__" and os.path.join(folder, name) != self._keep  # noqa: PTH118
        ]

    def _put_back(self, folder: str) -> None:
        if os.lstat(folder).st_mode != self._modes[folder]:
            os.chmod(folder, stat.S_IMODE(self._modes[folder]))  # noqa: PTH101
        entries = self._below[folder]
        for name in self._names(folder):
            if name not in entries:
                remove(os.path.join(folder, name))  # noqa: PTH118
        for name, entry in entries.items():
            path = os.path.join(folder, name)  # noqa: PTH118
            now = _seen(os.lstat(path)) if os.path.lexists(path) else None
            if path in self._below:
                if now is None or not stat.S_ISDIR(now[0]):
                    remove(path)
                    os.mkdir(path, 0o700)  # noqa: PTH102
                self._put_back(path)
            elif now != entry.seen and entry.content is not None:
                remove(path)
                _write(path, entry)


def _write(path: str, entry: _Entry) -> None:
    if isinstance(entry.content, str):
        os.symlink(entry.content, path)  # noqa: PTH211
    else:
        with open(path, "wb") as file:  # noqa: PTH123
            file.write(entry.content or b"")
        os.chmod(path, stat.S_IMODE(entry.seen[0]))  # noqa: PTH101
    entry.seen = _seen(os.lstat(path))


def _seen(status: os.stat_result) -> _Seen:
    # Whoever sets the time of a file back changes its `ctime`.
    return status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def remove(path: str) -> None:
    """Removes whatever is there, folders that are closed to their owner too; nothing is fine."""
    if os.path.isdir(path) and not os.path.islink(path):  # noqa: PTH112, PTH114
        os.chmod(path, 0o700)  # noqa: PTH101
        for place, folders, _ in os.walk(path):
            for name in folders:
                inner = os.path.join(place, name)  # noqa: PTH118
                if not os.path.islink(inner):  # noqa: PTH114
                    os.chmod(inner, 0o700)  # noqa: PTH101
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108
