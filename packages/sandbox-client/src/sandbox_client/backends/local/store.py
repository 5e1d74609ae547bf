# ruff: noqa: PTH101, PTH118 -- works on descriptors and walks large trees
"""Stored environments: content-addressed folder trees on disk, used as the overlays' lower layer.

Layout: `<folder>/<digest>/tree` with its files owned by the sandboxes' user. A tree is written
under a temporary name, verified and then renamed, so a digest's folder is complete if it exists.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import stat
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from sandbox_client.archives import entry_of
from sandbox_client.core.paths import PathRefusedError, relative_parts
from sandbox_client.core.trees import TreeEntry, check_tree, is_digest, tree_digest
from sandbox_client.errors import TooLarge, WrongRequest

__all__ = ["EMPTY_DIGEST", "EnvironmentStore"]

logger = logging.getLogger(__name__)

EMPTY_DIGEST = tree_digest(())
"""The environment without any file."""

_FIXED_TIME_S = 1_600_000_000
"""Every file gets this time, so that a tree is the same whenever it was put."""
_CHUNK_BYTES = 1 << 20


@dataclass
class _Stored:
    size_bytes: int
    used_at: float
    users: int = 0


class EnvironmentStore:
    """The environments of one host. Not thread-safe, except for `unpack`."""

    def __init__(
        self,
        folder: Path,
        *,
        uid: int,
        gid: int,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self._uid = uid
        self._gid = gid
        self.max_bytes = max_bytes
        self._clock = clock
        self._stored: dict[str, _Stored] = {}
        self._serial = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all stored files."""
        return sum(stored.size_bytes for stored in self._stored.values())

    def open(self) -> None:
        """Takes stock of the folder; removes what an earlier run left unfinished."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        for child in self.folder.iterdir():
            if is_digest(child.name) and (child / "tree").is_dir():
                size = sum(f.stat().st_size for f in child.rglob("*") if not f.is_symlink())
                self._stored[child.name] = _Stored(size, self._clock())
            else:
                shutil.rmtree(child)
        if EMPTY_DIGEST not in self._stored:
            partial = self.partial_folder()
            self._finish(partial)
            self.adopt(EMPTY_DIGEST, partial, 0)

    def __contains__(self, digest: str) -> bool:
        return digest in self._stored

    def tree(self, digest: str) -> Path:
        """Where the files of a stored environment are."""
        return self.folder / digest / "tree"

    @contextlib.contextmanager
    def reserve(self, digest: str) -> Iterator[None]:
        """Keeps an environment from being evicted while it is in use."""
        self.hold(digest)
        try:
            yield
        finally:
            self.let_go(digest)

    def hold(self, digest: str) -> None:
        """Counts one more user of an environment."""
        stored = self._stored[digest]
        stored.users += 1
        stored.used_at = self._clock()

    def let_go(self, digest: str) -> None:
        """Counts one user less."""
        self._stored[digest].users -= 1

    def partial_folder(self) -> Path:
        """A new folder to unpack into."""
        self._serial += 1
        partial = self.folder / f"partial-{self._serial}"
        (partial / "tree").mkdir(parents=True)
        return partial

    def unpack(self, archive: IO[bytes], digest: str, partial: Path) -> int:
        """Unpacks a tar into a partial folder and verifies it; returns its size in bytes.

        Blocking; runs in a thread.

        Raises:
            WrongRequest: no readable tar, an entry that leaves the tree, or another digest.
            TooLarge: its files are larger than the store.
        """
        try:
            entries = self._unpack(archive, partial / "tree")
        except (tarfile.TarError, EOFError) as error:
            raise WrongRequest(f"the environment is not a readable tar archive: {error}") from error
        except (PathRefusedError, FileExistsError) as error:
            raise WrongRequest(f"the environment cannot be stored: {error}") from error
        found = tree_digest(entries)
        if found != digest:
            raise WrongRequest(
                f"the environment's content has digest {found}, announced was {digest}; compute "
                "it with sandbox_client.EnvironmentTree"
            )
        self._finish(partial)
        return sum(entry.size for entry in entries)

    async def put(self, digest: str, archive: IO[bytes]) -> bool:
        """Stores a tree after verifying its digest; False if it was there."""
        if digest in self._stored:
            return False
        partial = self.partial_folder()
        try:
            size = await asyncio.to_thread(self.unpack, archive, digest, partial)
            self.adopt(digest, partial, size)
        finally:
            if partial.exists():
                await asyncio.to_thread(shutil.rmtree, partial)
        return True

    async def put_image_folder(self, archive: IO[bytes]) -> str:
        """Stores a folder of an image, as the Engine API packs it; returns its digest.

        The folder's own name is dropped, hard links become files, and what is neither a file, a
        folder nor a link is left out.
        """
        partial = self.partial_folder()
        try:
            digest, size = await asyncio.to_thread(self._unpack_image_folder, archive, partial)
            self.adopt(digest, partial, size)
        finally:
            if partial.exists():
                await asyncio.to_thread(shutil.rmtree, partial)
        return digest

    def adopt(self, digest: str, partial: Path, size_bytes: int) -> None:
        """Makes a verified partial folder the stored environment and evicts what no longer fits."""
        if digest in self._stored:
            shutil.rmtree(partial)
            return
        partial.rename(self.folder / digest)
        self._stored[digest] = _Stored(size_bytes, self._clock())
        self._evict(keep=digest)

    def _evict(self, keep: str) -> None:
        idle = sorted(
            (stored.used_at, digest)
            for digest, stored in self._stored.items()
            if stored.users == 0 and digest not in (keep, EMPTY_DIGEST)
        )
        for _, digest in idle:
            if self.size_bytes <= self.max_bytes:
                return
            logger.info("evicting environment %s", digest)
            del self._stored[digest]
            gone = self.folder / f"evicted-{digest}"
            (self.folder / digest).rename(gone)
            shutil.rmtree(gone)

    def _unpack_image_folder(self, archive: IO[bytes], partial: Path) -> tuple[str, int]:
        try:
            entries = self._unpack(archive, partial / "tree", from_image=True)
        except (tarfile.TarError, EOFError, PathRefusedError, FileExistsError) as error:
            raise WrongRequest(f"the image's work folder cannot be stored: {error}") from error
        self._finish(partial)
        return tree_digest(entries), sum(entry.size for entry in entries)

    def _unpack(
        self, archive: IO[bytes], root: Path, *, from_image: bool = False
    ) -> list[TreeEntry]:
        entries: dict[str, TreeEntry] = {}
        total = 0
        with tarfile.open(fileobj=archive, mode="r|") as tar:
            for member in tar:
                parts = relative_parts(member.name)
                if from_image:
                    parts = parts[1:]
                    if member.isdev():
                        continue
                if not parts:
                    continue
                path = "/".join(parts)
                total += member.size
                if total > self.max_bytes:
                    raise TooLarge(
                        f"the environment has over {self.max_bytes} bytes, which is all that the "
                        "store may take (limits.environments_bytes)"
                    )
                if from_image and member.islnk():
                    entries[path] = _hard_link(member, root, path, entries)
                    continue
                entry = entry_of(member, path)
                # Every parent is a folder made here: nothing is ever written through a link.
                check_tree([*_above(entries, path), entry])
                if path in entries and (entry.kind, entries[path].kind) != ("dir", "dir"):
                    raise PathRefusedError(f"path {path!r} occurs twice")
                if entry.kind == "file":
                    source = tar.extractfile(member)
                    assert source is not None
                    entry = _write_file(source, root / path, entry)
                elif entry.kind == "link":
                    (root / path).parent.mkdir(parents=True, exist_ok=True)
                    (root / path).symlink_to(entry.target)
                else:
                    (root / path).mkdir(parents=True, exist_ok=True)
                entries[path] = entry
        return list(entries.values())

    def _finish(self, partial: Path) -> None:
        """Gives the tree to the sandboxes' user, with fixed modes and times."""
        for folder, folders, files in os.walk(partial / "tree", topdown=False):
            for name in (*files, *folders):
                self._settle(os.path.join(folder, name))
        self._settle(str(partial / "tree"))
        partial.chmod(0o700)

    def _settle(self, path: str) -> None:
        os.lchown(path, self._uid, self._gid)
        mode = os.lstat(path).st_mode
        if stat.S_ISDIR(mode):
            os.chmod(path, 0o755)  # noqa: S103 -- the tree's own folders
        os.utime(path, (_FIXED_TIME_S, _FIXED_TIME_S), follow_symlinks=False)


def _above(entries: dict[str, TreeEntry], path: str) -> list[TreeEntry]:
    parts = path.split("/")
    above = ("/".join(parts[:depth]) for depth in range(1, len(parts)))
    return [entries[parent] for parent in above if parent in entries]


def _hard_link(
    member: tarfile.TarInfo, root: Path, path: str, entries: dict[str, TreeEntry]
) -> TreeEntry:
    first = "/".join(relative_parts(member.linkname)[1:])
    if first not in entries or entries[first].kind != "file":
        raise PathRefusedError(f"entry {path!r} is a link to {first!r}, which is no file before it")
    check_tree([*_above(entries, path), TreeEntry(path, "file")])
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    os.link(root / first, root / path)
    return replace(entries[first], path=path)


def _write_file(source: IO[bytes], target: Path, entry: TreeEntry) -> TreeEntry:
    target.parent.mkdir(parents=True, exist_ok=True)
    hashed = hashlib.sha256()
    size = 0
    with target.open("xb") as out:
        os.fchmod(out.fileno(), 0o755 if entry.executable else 0o644)
        while chunk := source.read(_CHUNK_BYTES):
            hashed.update(chunk)
            out.write(chunk)
            size += len(chunk)
    return TreeEntry(entry.path, "file", entry.executable, size, hashed.hexdigest())
