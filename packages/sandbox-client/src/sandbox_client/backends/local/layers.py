# ruff: noqa: PTH123, PTH208 -- works on descriptors and walks large trees
"""Snapshots on disk: a sandbox's upper layer frozen as one more lower layer for its forks.

Layout: `<folder>/<digest>/work` is the work folder's layer, with the overlay's own marks for what
was deleted; `<folder>/<digest>/mount<n>` holds the content of the n-th writable folder, if any. A
layer is named by its content and by the layers below it, so the same preparation is kept once. The
folder is emptied when a service starts: the leases of snapshots end with their service.
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sandbox_client.backends.ends import to_its_end
from sandbox_client.backends.local.store import EnvironmentStore
from sandbox_client.backends.local.users import Ids
from sandbox_client.backends.setup import require_environment
from sandbox_client.config import SandboxServiceConfig
from sandbox_client.core.limits import LimiterStatus
from sandbox_client.errors import EnvironmentUnknown, SandboxUnavailable, TooLarge
from sandbox_client.limiter import Quota
from sandbox_client.types import EnvironmentRef

__all__ = ["Layers", "SnapshotLayers", "open_stores"]

FOLDER = "snapshots"
"""Its place within the folder of environments, which is what the fork-server sees."""

_MAX_DEPTH = 128
_CHUNK_BYTES = 1 << 20
_BLOCK_BYTES = 4096
_VANISHED = (FileNotFoundError, NotADirectoryError)


@dataclass(frozen=True)
class Layers:
    """What a sandbox starts from; paths are relative to the folder of environments."""

    environment: str
    """Digest of the environment at the bottom."""
    snapshots: tuple[str, ...] = ()
    """Digests of the layers on top of it, the uppermost first."""
    mounts: tuple[int, ...] = ()
    """Which writable folders the uppermost one has content for."""

    @property
    def work(self) -> list[str]:
        """The work folder's layers, the uppermost first."""
        above = [f"{FOLDER}/{digest}/work" for digest in self.snapshots]
        return [*above, f"{self.environment}/tree"]

    def mount(self, number: int) -> str | None:
        """The content of a writable folder."""
        return f"{FOLDER}/{self.snapshots[0]}/mount{number}" if number in self.mounts else None


def open_stores(
    config: SandboxServiceConfig, ids: Ids
) -> tuple[EnvironmentStore, "SnapshotLayers"]:
    """The stored environments and snapshots of a service, still to be opened."""
    limits = config.limits
    store = EnvironmentStore(
        config.state_dir / "environments",
        uid=ids.uid,
        gid=ids.gid,
        max_bytes=limits.environments_bytes,
    )
    quota = Quota("snapshots_bytes", limits.snapshots_bytes, limits.retry_after_s)
    return store, SnapshotLayers(store, ids=ids, quota=quota, largest_bytes=limits.upload_bytes)


@dataclass
class _Stored:
    layers: Layers
    size_bytes: int
    quota: contextlib.ExitStack
    ids: set[str] = field(default_factory=set)


class SnapshotLayers:
    """The snapshots of one service, by id and by content."""

    def __init__(
        self, store: EnvironmentStore, *, ids: Ids, quota: Quota, largest_bytes: int
    ) -> None:
        self._store = store
        self._folder = store.folder / FOLDER
        self._ids = ids
        self._largest_bytes = largest_bytes
        self._stored: dict[str, _Stored] = {}
        self._by_id: dict[str, str] = {}
        self._serial = 0
        # Copies share the disk; one after the other is as fast, and knows what space is left.
        self._copying = asyncio.Lock()
        self.quota = quota

    def limiters(self) -> list[LimiterStatus]:
        """Disk space of stored environments and of snapshots."""
        limit, used = float(self._store.max_bytes), float(self._store.size_bytes)
        return [LimiterStatus("environments_bytes", limit, used), self.quota.status()]

    def open(self) -> None:
        """Empties the folder: what an earlier service kept has no lease any more."""
        if self._folder.exists():
            shutil.rmtree(self._folder)
        self._folder.mkdir(mode=0o700)

    def find(self, environment: EnvironmentRef) -> Layers:
        """What a sandbox of a snapshot or a stored environment starts from.

        Raises:
            EnvironmentUnknown: neither is here.
        """
        if not environment.snapshot:
            require_environment(self._store, environment.tree_digest)
            return Layers(environment.tree_digest)
        digest = self._by_id.get(environment.snapshot)
        if digest is None:
            raise EnvironmentUnknown(
                f"this host does not hold snapshot {environment.snapshot}",
                metadata={"snapshot": environment.snapshot},
            )
        return self._stored[digest].layers

    async def keep(self, snapshot_id: str, upper_fd: int, mounts: Sequence[int], on: Layers) -> int:
        """Copies a sandbox's upper layer and writable folders; returns their size in bytes.

        Args:
            snapshot_id: the id to keep them under.
            upper_fd: the overlay's upper layer.
            mounts: the writable folders, in their order.
            on: what the sandbox itself started from.

        Raises:
            QuotaExhausted, TooLarge: they do not fit.
            SandboxUnavailable: the disk is full or cannot hold an overlay's layer.
        """
        async with self._copying:
            self._serial += 1
            partial = self._folder / f"partial-{self._serial}"
            copy = _Copy(self._ids, self.quota.left, self._largest_bytes)
            try:
                # To its end in any case, as the thread cannot be stopped.
                filled = await to_its_end(asyncio.to_thread(copy.run, partial, upper_fd, mounts))
                return self._adopt(snapshot_id, partial, copy, filled, on)
            except _NoSpaceError:
                raise self.quota.refusal() from None
            except OSError as error:
                raise SandboxUnavailable(f"the snapshot cannot be stored: {error}") from error
            finally:
                if partial.exists():
                    await asyncio.to_thread(shutil.rmtree, partial)

    def _adopt(
        self, snapshot_id: str, partial: Path, copy: "_Copy", filled: tuple[int, ...], on: Layers
    ) -> int:
        below = "\n".join(on.work)
        digest = hashlib.sha256(f"{below}\n{copy.digest}".encode()).hexdigest()
        if digest not in self._stored:
            stack = contextlib.ExitStack()
            stack.enter_context(self.quota.share())(copy.size_bytes)
            partial.rename(self._folder / digest)
            layers = Layers(on.environment, (digest, *on.snapshots), filled)
            self._stored[digest] = _Stored(layers, copy.size_bytes, stack)
        stored = self._stored[digest]
        stored.ids.add(snapshot_id)
        self._by_id[snapshot_id] = digest
        self._store.hold(on.environment)
        return stored.size_bytes

    async def remove(self, snapshot_id: str) -> None:
        """Forgets an id; removes its layer if no other id stands for it."""
        digest = self._by_id.pop(snapshot_id, "")
        stored = self._stored.get(digest)
        if stored is None:
            return
        self._store.let_go(stored.layers.environment)
        stored.ids.discard(snapshot_id)
        if stored.ids:
            return
        del self._stored[digest]
        gone = self._folder / f"gone-{digest}"
        (self._folder / digest).rename(gone)
        stored.quota.close()
        await asyncio.to_thread(shutil.rmtree, gone)


class _NoSpaceError(Exception):
    """The copy takes more than is left."""


class _Copy:
    """Copies folders with their modes, times, links and marks, and counts and hashes it all.

    What is read belongs to the sandbox, which may change it meanwhile: no link is followed.
    """

    def __init__(self, ids: Ids, left_bytes: int, largest_bytes: int) -> None:
        self._owner = (ids.uid, ids.gid)
        self._opaque_mark = ids.opaque_mark
        self._left_bytes = left_bytes
        self._largest_bytes = largest_bytes
        self._hash = hashlib.sha256()
        self.size_bytes = 0

    @property
    def digest(self) -> str:
        """Digest of all that was copied."""
        return self._hash.hexdigest()

    def run(self, target: Path, upper_fd: int, mounts: Sequence[int]) -> tuple[int, ...]:
        """Copies everything; returns the numbers of the folders that were not empty. Blocks."""
        filled = []
        target.mkdir(mode=0o700)
        self._top(upper_fd, target / "work")
        for number, fd in enumerate(mounts):
            if os.listdir(fd):
                filled.append(number)
                self._top(fd, target / f"mount{number}")
        return tuple(filled)

    def _top(self, source: int, target: Path) -> None:
        target.mkdir()
        self._note("top", target.name)
        with _opened(str(target)) as to, _opened(".", source) as fd:
            self._folder(fd, to, "", 0)

    def _folder(self, source: int, target: int, prefix: str, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise TooLarge(f"folder {prefix!r} is nested over {_MAX_DEPTH} levels deep")
        for name in sorted(os.listdir(source)):
            # A process that still runs may have changed it under our eyes.
            with contextlib.suppress(*_VANISHED):
                self._entry(source, target, name, prefix, depth)
        found = os.fstat(source)
        with contextlib.suppress(OSError):
            os.setxattr(target, self._opaque_mark, os.getxattr(source, self._opaque_mark))
            self._note("opaque", prefix)
        os.fchown(target, *self._owner)
        os.fchmod(target, stat.S_IMODE(found.st_mode) & 0o777)
        os.utime(target, ns=(found.st_mtime_ns, found.st_mtime_ns))

    def _entry(self, source: int, target: int, name: str, prefix: str, depth: int) -> None:
        found = os.stat(name, dir_fd=source, follow_symlinks=False)
        path, mode = prefix + name, stat.S_IMODE(found.st_mode) & 0o777
        # Its place in a folder.
        self._count(1)
        if stat.S_ISDIR(found.st_mode):
            self._note("dir", path, f"{mode:o}")
            os.mkdir(name, dir_fd=target)
            with _opened(name, source) as fd, _opened(name, target) as to:
                self._folder(fd, to, f"{path}/", depth + 1)
            return
        if stat.S_ISLNK(found.st_mode):
            link = os.readlink(name, dir_fd=source)
            os.symlink(link, name, dir_fd=target)
            self._note("link", path, link)
        elif stat.S_ISREG(found.st_mode):
            self._note("file", path, f"{mode:o}", self._file(source, target, name))
            os.chmod(name, mode, dir_fd=target)
        elif stat.S_ISCHR(found.st_mode) and found.st_rdev == 0:
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)
            self._note("gone", path)
            return
        else:
            return  # pipes and sockets have no content to keep
        os.chown(name, *self._owner, dir_fd=target, follow_symlinks=False)
        times = (found.st_mtime_ns, found.st_mtime_ns)
        os.utime(name, ns=times, dir_fd=target, follow_symlinks=False)

    def _file(self, source: int, target: int, name: str) -> str:
        hashed = hashlib.sha256()
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        made = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with (
            open(os.open(name, flags, dir_fd=source), "rb", buffering=0) as file,
            open(os.open(name, made, 0o600, dir_fd=target), "wb", buffering=0) as out,
        ):
            left = os.fstat(file.fileno()).st_size
            self._count(left)
            while chunk := file.read(min(left, _CHUNK_BYTES)):
                hashed.update(chunk)
                out.write(chunk)
                left -= len(chunk)
        return hashed.hexdigest()

    def _count(self, size: int) -> None:
        self.size_bytes += -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
        if self.size_bytes > self._largest_bytes:
            raise TooLarge(
                f"the sandbox has written over {self._largest_bytes} bytes, the most that a "
                "snapshot may have (limits.upload_bytes)"
            )
        if self.size_bytes > self._left_bytes:
            raise _NoSpaceError

    def _note(self, *fields: str) -> None:
        raw = [field.encode("utf-8", "surrogateescape") for field in fields]
        self._hash.update(b"\0".join(raw) + b"\0\n")


@contextlib.contextmanager
def _opened(name: str, folder: int | None = None) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)
