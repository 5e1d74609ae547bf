"""The service's own copies of what sandboxes start from, to compare with."""

import asyncio
import contextlib
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from sandbox_client.archives import scan_archive, scan_folder
from sandbox_client.backends.local.store import EnvironmentStore
from sandbox_client.core.git_diff import FileState
from sandbox_client.core.trees import TreeEntry, tree_digest

__all__ = ["StoredTree", "TreeShelf"]

_LISTINGS = 64


@dataclass(frozen=True)
class StoredTree:
    """A tree on disk, with what is in it by path."""

    digest: str
    folder: Path
    entries: dict[str, TreeEntry] = field(repr=False)

    def state(self, path: str) -> FileState | None:
        """A file as git sees it; None if there is none."""
        entry = self.entries.get(path)
        if entry is None or entry.kind == "dir":
            return None
        if entry.kind == "link":
            return FileState(entry.target.encode("utf-8", "surrogateescape"), "120000")
        content = (self.folder / path).read_bytes()
        return FileState(content, "100755" if entry.executable else "100644")


class TreeShelf:
    """Trees in a store, their listings at hand."""

    def __init__(self, store: EnvironmentStore, limit_bytes: int) -> None:
        self.store = store
        self._limit_bytes = limit_bytes
        self._open: dict[str, StoredTree] = {}

    async def put(self, digest: str, archive: IO[bytes]) -> bool:
        """Stores a tree after verifying its digest; False if it was there."""
        store = self.store
        if digest in store:
            return False
        partial = store.partial_folder()
        try:
            size = await asyncio.to_thread(store.unpack, archive, digest, partial)
            store.adopt(digest, partial, size)
        finally:
            if partial.exists():
                await asyncio.to_thread(shutil.rmtree, partial)
        return True

    async def put_unnamed(self, archive: IO[bytes]) -> str:
        """Stores a tree whose digest is not known yet; returns it."""
        entries = await asyncio.to_thread(scan_archive, archive, self._limit_bytes)
        archive.seek(0)
        digest = tree_digest(entries.values())
        await self.put(digest, archive)
        return digest

    async def hold(self, digest: str) -> StoredTree:
        """A stored tree, which stays until it is let go."""
        self.store.hold(digest)
        try:
            found = self._open.pop(digest, None)
            if found is None:
                folder = self.store.tree(digest)
                entries = await asyncio.to_thread(scan_folder, folder)
                found = StoredTree(digest, folder, entries)
        except BaseException:
            self.let_go(digest)
            raise
        self._open[digest] = found
        while len(self._open) > _LISTINGS:
            self._open.pop(next(iter(self._open)))
        return found

    def let_go(self, digest: str) -> None:
        """Gives back what `hold` took."""
        with contextlib.suppress(KeyError):
            self.store.let_go(digest)
