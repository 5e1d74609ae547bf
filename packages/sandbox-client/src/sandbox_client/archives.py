"""Reading tar archives as trees: what each member is, and the whole's digest. Calls block."""

import hashlib
import os
import tarfile
from pathlib import Path
from typing import IO

from sandbox_client.core.paths import PathRefusedError, relative_parts
from sandbox_client.core.trees import TreeEntry, check_tree
from sandbox_client.errors import TooLarge, WrongRequest

__all__ = ["entry_of", "scan_archive", "scan_folder"]

_CHUNK_BYTES = 1 << 20


def entry_of(member: tarfile.TarInfo, path: str) -> TreeEntry:
    """What a member is in a tree; a file still without its hash.

    Raises:
        PathRefusedError: it is neither a file, a folder nor a symbolic link.
    """
    if member.isdir():
        return TreeEntry(path, "dir")
    if member.issym():
        return TreeEntry(path, "link", target=member.linkname)
    if member.isreg():
        return TreeEntry(path, "file", executable=bool(member.mode & 0o100), size=member.size)
    raise PathRefusedError(
        f"entry {path!r} is neither a file, a folder nor a symbolic link (hard links and devices "
        "are not part of an environment)"
    )


def scan_archive(archive: IO[bytes], max_bytes: int) -> dict[str, TreeEntry]:
    """The tree that a tar holds, by path, with folders above added and every file hashed.

    Raises:
        WrongRequest: no readable tar, or its members do not form a tree.
        TooLarge: its files have more than `max_bytes`.
    """
    entries: list[TreeEntry] = []
    total = 0
    try:
        with tarfile.open(fileobj=archive, mode="r|") as tar:
            for member in tar:
                path = "/".join(relative_parts(member.name))
                if not path:
                    continue
                total += member.size
                if total > max_bytes:
                    raise TooLarge(f"the files have over {max_bytes} bytes, the most that is taken")
                entry = entry_of(member, path)
                if entry.kind == "file":
                    source = tar.extractfile(member)
                    assert source is not None
                    hashed = hashlib.sha256()
                    while chunk := source.read(_CHUNK_BYTES):
                        hashed.update(chunk)
                    entry = TreeEntry(
                        path, "file", entry.executable, entry.size, hashed.hexdigest()
                    )
                entries.append(entry)
        return check_tree(entries)
    except (tarfile.TarError, EOFError) as error:
        raise WrongRequest(f"not a readable tar archive: {error}") from error
    except PathRefusedError as error:
        raise WrongRequest(f"the archive is no tree: {error}") from error


def scan_folder(folder: Path) -> dict[str, TreeEntry]:
    """The tree that a folder holds, by path, every file hashed."""
    entries: dict[str, TreeEntry] = {}
    for parent, folders, files in os.walk(folder):
        base = os.path.relpath(parent, folder)
        prefix = "" if base == "." else f"{base}/"
        for name in (*folders, *files):
            path, full = prefix + name, Path(parent, name)
            if full.is_symlink():
                entries[path] = TreeEntry(path, "link", target=str(full.readlink()))
            elif full.is_dir():
                entries[path] = TreeEntry(path, "dir")
            else:
                found = full.stat()
                with full.open("rb") as file:
                    sha256 = _sha256(file)
                executable = bool(found.st_mode & 0o100)
                entries[path] = TreeEntry(path, "file", executable, found.st_size, sha256)
    return entries


def _sha256(source: IO[bytes]) -> str:
    hashed = hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        hashed.update(chunk)
    return hashed.hexdigest()
