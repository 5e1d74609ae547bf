"""Folder trees and their digest: what content addressing means here.

A tree is files (content and whether executable), symbolic links and folders. Owners, times and
other permission bits are not part of it. The digest is the SHA-256 of a canonical listing: one line
for each entry in the order of its path's bytes, parents included.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from sandbox_client.core.paths import PathRefusedError, relative_parts

__all__ = ["TreeEntry", "check_tree", "entry_for_file", "is_digest", "tree_digest"]

_FORMAT = "tailrace-tree-v1"


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """One entry of a tree.

    `kind` is "file", "link" or "dir". `sha256` and `size` belong to a file, `target` to a link.
    """

    path: str
    kind: str
    executable: bool = False
    size: int = 0
    sha256: str = ""
    target: str = ""


def entry_for_file(path: str, content: bytes, *, executable: bool = False) -> TreeEntry:
    """The entry of a file with this content."""
    return TreeEntry(path, "file", executable, len(content), hashlib.sha256(content).hexdigest())


def is_digest(text: str) -> bool:
    """Whether `text` has the form of a tree digest: 64 lower-case hexadecimal digits."""
    return len(text) == 64 and all(c in "0123456789abcdef" for c in text)


def check_tree(entries: Iterable[TreeEntry]) -> dict[str, TreeEntry]:
    """The entries by path, folders above them included, after checking that they form a tree.

    Raises:
        PathRefusedError: a path leaves the tree, occurs twice, or goes through a file or a link.
    """
    by_path: dict[str, TreeEntry] = {}
    for entry in entries:
        if "/".join(relative_parts(entry.path)) != entry.path:
            raise PathRefusedError(f"path {entry.path!r} is not in its shortest form")
        earlier = by_path.get(entry.path)
        if earlier is not None and (earlier.kind, entry.kind) != ("dir", "dir"):
            raise PathRefusedError(
                f"path {entry.path!r} occurs twice, as {earlier.kind} and as {entry.kind}"
            )
        by_path[entry.path] = entry
    for path in list(by_path):
        parts = path.split("/")
        for depth in range(1, len(parts)):
            parent = by_path.setdefault(
                "/".join(parts[:depth]), TreeEntry("/".join(parts[:depth]), "dir")
            )
            if parent.kind != "dir":
                raise PathRefusedError(
                    f"path {path!r} goes through the {parent.kind} {parent.path!r}"
                )
    return by_path


def tree_digest(entries: Iterable[TreeEntry]) -> str:
    """The digest of a tree, the same whatever order the entries come in.

    Raises:
        PathRefusedError: the entries do not form a tree.
    """
    by_path = check_tree(entries)
    total = hashlib.sha256(f"{_FORMAT}\n".encode())
    for path in sorted(by_path, key=_path_bytes):
        entry = by_path[path]
        if entry.kind == "file":
            mode = "x" if entry.executable else "-"
            fields = ["file", mode, str(entry.size), entry.sha256]
        elif entry.kind == "link":
            fields = ["link", hashlib.sha256(_path_bytes(entry.target)).hexdigest()]
        else:
            fields = ["dir"]
        # A NUL cannot occur in a path, so no two trees share a listing.
        total.update("\0".join([*fields, ""]).encode() + _path_bytes(path) + b"\0\n")
    return total.hexdigest()


def _path_bytes(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")
