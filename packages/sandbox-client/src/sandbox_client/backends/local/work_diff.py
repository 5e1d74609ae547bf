# ruff: noqa: PTH112, PTH114, PTH118, PTH123 -- works on descriptors and walks large trees
"""The diff of a sandbox's work folder, read from the overlay's upper layer.

The upper layer holds exactly what differs from the environment: changed and new files, and marks
for deleted ones. No path of the sandbox leads to it, nothing in the sandbox runs, and every step of
the walk refuses links, so the sandbox cannot bend what is read.
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from sandbox_client.core.git_diff import Effort, FileState, file_diff
from sandbox_client.errors import TooLarge

__all__ = ["work_diff"]

_MAX_DEPTH = 128
# An entry has become another kind of thing, or is gone, since it was looked at.
_VANISHED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EAGAIN)


def work_diff(
    upper_fd: int, lower: Path, *, exclude: Sequence[str], max_bytes: int, opaque_mark: str
) -> bytes:
    """The diff in git's format. Blocks while it reads.

    Args:
        upper_fd: the upper layer's folder.
        lower: the environment's folder.
        exclude: patterns of names; what has such a component is left out.
        max_bytes: bound of the diff and of each file in it.
        opaque_mark: the attribute of a folder that hides the environment's.

    Raises:
        TooLarge: the bound is passed.
    """
    walk = _Walk(lower, exclude, max_bytes, opaque_mark)
    walk.folder(os.dup(upper_fd), "", lower_is_folder=True, depth=0)
    effort = Effort()
    parts = []
    size = 0
    for path in sorted(walk.changed, key=os.fsencode):
        part = file_diff(os.fsencode(path), walk.old(path), walk.changed[path], effort)
        size += len(part)
        if size > max_bytes:
            raise TooLarge(
                f"the diff is larger than {max_bytes} bytes (limits.diff_bytes, or the request's "
                "max_bytes)"
            )
        parts.append(part)
    return b"".join(parts)


class _Walk:
    """Collects the paths that may differ, with their present state; None means gone."""

    def __init__(
        self, lower: Path, exclude: Sequence[str], max_bytes: int, opaque_mark: str
    ) -> None:
        self._opaque_mark = opaque_mark
        self._lower = lower
        self._exclude = exclude
        self._max_bytes = max_bytes
        self._read_bytes = 0
        self.changed: dict[str, FileState | None] = {}

    def folder(self, fd: int, prefix: str, *, lower_is_folder: bool, depth: int) -> None:
        """Looks at one folder of the upper layer; closes `fd`."""
        try:
            if depth > _MAX_DEPTH:
                raise TooLarge(f"folder {prefix!r} is nested over {_MAX_DEPTH} levels deep")
            if lower_is_folder and prefix and self._is_opaque(fd):
                self._gone(prefix.rstrip("/"))
            for name in os.listdir(fd):
                if not self._is_excluded(name):
                    try:
                        self._entry(fd, name, prefix, depth)
                    except OSError as error:
                        # A command that still runs has changed it under our eyes.
                        if error.errno not in _VANISHED:
                            raise
        finally:
            os.close(fd)

    def _entry(self, fd: int, name: str, prefix: str, depth: int) -> None:
        path = prefix + name
        found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        below = os.path.join(self._lower, path)
        lower_is_folder = os.path.isdir(below) and not os.path.islink(below)
        if stat.S_ISDIR(found.st_mode):
            if not lower_is_folder:
                self._gone(path)
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            self.folder(inner, f"{path}/", lower_is_folder=lower_is_folder, depth=depth + 1)
            return
        if lower_is_folder or not stat.S_ISREG(found.st_mode):
            self._gone(path)
        if stat.S_ISREG(found.st_mode):
            self.changed[path] = self._read(fd, name, path)
        elif stat.S_ISLNK(found.st_mode):
            self.changed[path] = FileState(os.fsencode(os.readlink(name, dir_fd=fd)), "120000")
        # Pipes, sockets and marks of deletion have no content to show.

    def _read(self, fd: int, name: str, path: str) -> FileState:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
        with open(file, "rb") as source:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.ENXIO, "not a plain file any more")
            content = source.read(self._max_bytes + 1)
        self._read_bytes += len(content)
        if self._read_bytes > 4 * self._max_bytes or len(content) > self._max_bytes:
            raise TooLarge(
                f"{path!r} makes the diff larger than {self._max_bytes} bytes (limits.diff_bytes, "
                "or the request's max_bytes)"
            )
        return FileState(content, _mode(found.st_mode))

    def _gone(self, path: str) -> None:
        """Marks the environment's file at `path`, or all files below it, as removed."""
        for inner in self._lower_files(path):
            self.changed.setdefault(inner, None)

    def _lower_files(self, path: str) -> Iterator[str]:
        top = self._lower / path
        if top.is_symlink() or top.is_file():
            yield path
            return
        for folder, folders, files in os.walk(top):
            folders[:] = [name for name in folders if not self._is_excluded(name)]
            relative = os.path.relpath(folder, self._lower)
            links = [f for f in folders if os.path.islink(f"{folder}/{f}")]
            for name in (*files, *links):
                if not self._is_excluded(name):
                    yield f"{relative}/{name}"

    def _is_opaque(self, fd: int) -> bool:
        try:
            return os.getxattr(fd, self._opaque_mark) == b"y"
        except OSError:
            return False

    def _is_excluded(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._exclude)

    def old(self, path: str) -> FileState | None:
        """The environment's state of a file."""
        below = self._lower / path
        try:
            mode = below.lstat().st_mode
            # A link above it would lead out of the tree; then the environment has no such file.
            if any(parent.is_symlink() for parent in self._parents(below)):
                return None
            if stat.S_ISLNK(mode):
                return FileState(os.fsencode(below.readlink()), "120000")
            if stat.S_ISREG(mode):
                return FileState(below.read_bytes(), _mode(mode))
        except (FileNotFoundError, NotADirectoryError):
            pass
        return None

    def _parents(self, path: Path) -> Iterator[Path]:
        for parent in path.parents:
            if parent == self._lower:
                return
            yield parent


def _mode(mode: int) -> str:
    return "100755" if mode & 0o100 else "100644"
