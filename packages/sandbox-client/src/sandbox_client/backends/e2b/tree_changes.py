"""Which files of a work folder differ from the environment it started from. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sandbox_client.core.trees import TreeEntry

__all__ = ["Changes", "entries_from_manifest", "tree_changes"]


@dataclass(frozen=True)
class Changes:
    """Paths, sorted by their bytes."""

    present: tuple[str, ...]
    """New or different."""
    gone: tuple[str, ...]


def entries_from_manifest(rows: Sequence[Sequence[object]]) -> dict[str, TreeEntry]:
    """A listing made inside a sandbox (`inside/files.py`, op_manifest) by path.

    Raises:
        ValueError: a row has another form.
    """
    entries = {}
    for row in rows:
        match row:
            case [str(path), "file", bool(executable), int(size), str(sha256)]:
                entries[path] = TreeEntry(path, "file", executable, size, sha256)
            case [str(path), "link", _, _, str(target)]:
                entries[path] = TreeEntry(path, "link", target=target)
            case _:
                raise ValueError(f"a listing's row has an unknown form: {str(row)[:200]}")
    return entries


def tree_changes(
    before: Mapping[str, TreeEntry], after: Mapping[str, TreeEntry], exclude: Sequence[str]
) -> Changes:
    """Files and links that were added, changed or removed; folders by themselves do not count.

    Args:
        before: The environment.
        after: The work folder.
        exclude: Patterns of names; what has such a component is left out.
    """

    def counts(entry: TreeEntry) -> bool:
        return entry.kind != "dir" and not any(
            fnmatchcase(name, pattern) for name in entry.path.split("/") for pattern in exclude
        )

    old = {path: entry for path, entry in before.items() if counts(entry)}
    new = {path: entry for path, entry in after.items() if counts(entry)}
    present = [path for path, entry in new.items() if old.get(path) != entry]
    gone = [path for path in old if path not in new]
    return Changes(tuple(sorted(present, key=_bytes)), tuple(sorted(gone, key=_bytes)))


def _bytes(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")
