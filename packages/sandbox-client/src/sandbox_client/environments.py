"""Making environments: a folder tree with its digest, ready to be put into the service."""

import io
import os
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from sandbox_client.core.trees import TreeEntry, check_tree, entry_for_file, tree_digest

__all__ = ["EnvironmentTree"]

_SKIPPED = frozenset({"__pycache__", ".pytest_cache"})


@dataclass(frozen=True)
class EnvironmentTree:
    """A folder tree in memory: relative path -> content, and which files are executable.

    Two trees with the same content have the same `digest`, whenever and wherever they were made.
    """

    files: Mapping[str, bytes]
    executable: frozenset[str] = frozenset()
    links: Mapping[str, str] = field(default_factory=dict)
    """Symbolic links: path -> target."""
    folders: frozenset[str] = frozenset()
    """Folders that would be empty otherwise."""

    def __post_init__(self) -> None:
        check_tree(self._entries())

    @classmethod
    def from_folder(
        cls, folder: Path, *, skip: Callable[[str], bool] = lambda name: name in _SKIPPED
    ) -> "EnvironmentTree":
        """Reads a folder; `skip` tells by name which files and folders to leave out."""
        files: dict[str, bytes] = {}
        executable: set[str] = set()
        links: dict[str, str] = {}
        folders: set[str] = set()
        for parent, names, leaves in os.walk(folder):
            names[:] = [name for name in names if not skip(name)]
            base = Path(parent)
            for name in [*names, *leaves]:
                path = base / name
                relative = path.relative_to(folder).as_posix()
                if skip(name):
                    continue
                if path.is_symlink():
                    links[relative] = str(path.readlink())
                elif path.is_dir():
                    folders.add(relative)
                else:
                    files[relative] = path.read_bytes()
                    if path.stat().st_mode & 0o100:
                        executable.add(relative)
        return cls(files, frozenset(executable), links, frozenset(folders))

    @cached_property
    def digest(self) -> str:
        """Name of this content in the service: 64 hexadecimal digits."""
        return tree_digest(self._entries())

    def tar_bytes(self) -> bytes:
        """The tree as an archive, the same bytes every time."""
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path, entry in sorted(check_tree(self._entries()).items()):
                info = tarfile.TarInfo(path)
                if entry.kind == "dir":
                    info.type, info.mode = tarfile.DIRTYPE, 0o755
                    tar.addfile(info)
                elif entry.kind == "link":
                    info.type, info.linkname = tarfile.SYMTYPE, entry.target
                    tar.addfile(info)
                else:
                    info.mode = 0o755 if entry.executable else 0o644
                    info.size = entry.size
                    tar.addfile(info, io.BytesIO(self.files[path]))
        return out.getvalue()

    def _entries(self) -> list[TreeEntry]:
        return [
            *(TreeEntry(path, "dir") for path in self.folders),
            *(TreeEntry(path, "link", target=target) for path, target in self.links.items()),
            *(
                entry_for_file(path, content, executable=path in self.executable)
                for path, content in self.files.items()
            ),
        ]
