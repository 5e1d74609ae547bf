"""A store in a folder: a shared file system, a local disk or `/dev/shm` alike.

    ROOT/RUN/0000000012-0003/                   number 12, incarnation 3
        model-<checksum>.safetensors            payload, named by its bytes
        manifest-<id>.json                      written last: the version exists from here on

Each file is written under a hidden name, synced, renamed, and its folder synced. Files are
read-only and never change, so a receiver may hard-link them. Two incarnations never share a folder,
so a publisher that was fenced while asleep can disturb nobody.
"""

import errno
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

import xxhash

from weight_sync.core.manifest import Manifest, PayloadFile
from weight_sync.errors import PayloadMissing, StoreFull
from weight_sync.stores.base import (
    Committed,
    Step,
    check_manifest,
    is_manifest,
    manifest_name,
    no_step,
    parse_version,
    version_name,
)
from weight_sync.stores.spares import Spares
from weight_sync.stores.writing import Writer

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- memory that processes share is the point
_PIECE_BYTES = 1 << 20
_MEMORY_THREADS = 2
_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


class FolderStore:
    """Versions as folders under one root. See the module's docstring for the layout."""

    def __init__(
        self, root: Path, *, sync: bool = True, recycle: bool = False, on_step: Step = no_step
    ) -> None:
        """Use `root`, which is made at the first write.

        Args:
            root: the store's folder.
            sync: sync files and folders before a version counts as committed. Off, a version can
                be torn by a power cut (not by a killed process); its checksums still tell.
            recycle: write a payload into the memory of a deleted one; for tmpfs, see `spares`.
            on_step: for tests: called before every write, sync and rename.
        """
        self.root = root.absolute()
        self._sync = sync
        self._spares = Spares(self.root) if recycle else None
        self._on_step = on_step

    @classmethod
    def from_uri(cls, uri: str) -> "FolderStore":
        """Open `file:///path` or a plain path; what is in `/dev/shm` is memory."""
        return cls.at(path_of(uri))

    @classmethod
    def at(cls, root: Path) -> "FolderStore":
        """Open a folder, and treat it as memory if it is in `/dev/shm`."""
        memory = SHARED_MEMORY in root.parents
        return cls(root, sync=not memory, recycle=memory)

    @property
    def uri(self) -> str:
        """`file://` and the absolute path."""
        return self.root.as_uri()

    def begin(self, run: str, number: int, incarnation: int) -> "FolderPublication":
        """Start writing a version in a folder of its own.

        Raises:
            StoreFull: no space is left.
        """
        folder = self.root / run / version_name(number, incarnation)
        self._on_step("mkdir")
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise _space(error, folder, 0) from error
        return self._publication(folder)

    def join(self, run: str, number: int, incarnation: int) -> "FolderPublication":
        """Write to a folder that another process made."""
        return self._publication(self.root / run / version_name(number, incarnation))

    def _publication(self, folder: Path) -> "FolderPublication":
        return FolderPublication(
            folder, sync=self._sync, spares=self._spares, on_step=self._on_step
        )

    def read_manifest(self, uri: str) -> Manifest:
        """Read a manifest and compare it with the id in its name."""
        return check_manifest(uri, self.read_bytes)

    def read_bytes(self, uri: str) -> bytes:
        """Read a file."""
        with self.open(uri) as file:
            return file.read()

    def open(self, uri: str) -> BinaryIO:
        """Open a file."""
        path = path_of(uri)
        try:
            return path.open("rb")
        except FileNotFoundError as error:
            raise PayloadMissing(
                f"no file at {path}: it was pruned, or this host does not see the store. "
                "Go to the newest version, or mount the store at the same path"
            ) from error

    def committed(self, run: str) -> list[Committed]:
        """Return the committed versions; folders without a manifest are not there."""
        found = []
        for number, incarnation, folder in self._folders(run):
            found += [
                Committed(run, number, incarnation, path.as_uri())
                for path in folder.iterdir()
                if is_manifest(path.name)
            ]
        return found

    def last_number(self, run: str) -> int:
        """Return the highest number in use, torn versions included."""
        return max((number for number, _, _ in self._folders(run)), default=0)

    def remove(self, version: Committed) -> None:
        """Delete a version's folder, its manifest first."""
        manifest = path_of(version.manifest_uri)
        self._on_step("remove manifest")
        manifest.unlink(missing_ok=True)
        if self._spares is not None:
            with suppress(ValueError, FileNotFoundError):
                largest = max(manifest.parent.iterdir(), key=lambda path: path.stat().st_size)
                self._on_step("keep spare")
                self._spares.keep(largest)
        self._on_step("remove folder")
        _remove_tree(manifest.parent)

    def sweep(self, run: str, *, before_incarnation: int) -> int:
        """Delete unfinished versions of incarnations before this one."""
        whole = {path_of(version.manifest_uri).parent for version in self.committed(run)}
        torn = [
            folder
            for _, incarnation, folder in self._folders(run)
            if incarnation < before_incarnation and folder not in whole
        ]
        for folder in torn:
            _remove_tree(folder)
        return len(torn)

    def _folders(self, run: str) -> list[tuple[int, int, Path]]:
        found = []
        with suppress(FileNotFoundError):
            for folder in (self.root / run).iterdir():
                version = parse_version(folder.name)
                if version and folder.is_dir():
                    found.append((*version, folder))
        return sorted(found)


class FolderPublication:
    """One version's folder while it is written."""

    def __init__(self, folder: Path, *, sync: bool, spares: Spares | None, on_step: Step) -> None:
        self.folder = folder
        self._sync = sync
        self._spares = spares
        self._on_step = on_step

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> PayloadFile:
        """Write a payload under its checksum: `model.safetensors` -> `model-<hex>.safetensors`."""
        hidden = self.folder / f".{name}.part"
        size_bytes, checksum = self._write_hidden(hidden, pieces, recycle=True)
        stem, dot, suffix = name.partition(".")
        final = f"{stem}-{checksum}{dot}{suffix}"
        self._reveal(hidden, self.folder / final)
        return PayloadFile(final, size_bytes, checksum)

    def write_note(self, name: str, data: bytes) -> None:
        """Write under a hidden name and rename."""
        hidden = self.folder / f".{name}.part"
        self._write_hidden(hidden, [data])
        self._reveal(hidden, self.folder / name)

    def read_note(self, name: str) -> bytes | None:
        """Read a note."""
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def commit(self, manifest: Manifest) -> str:
        """Write the manifest; once its name is there the version exists."""
        data = manifest.to_bytes()
        hidden = self.folder / ".manifest.part"
        self._write_hidden(hidden, [data])
        final = self.folder / manifest_name(data)
        self._reveal(hidden, final)
        # The version's folder itself must survive a power cut too.
        self._sync_folder(self.folder.parent)
        return final.as_uri()

    def abandon(self) -> None:
        """Remove the folder."""
        _remove_tree(self.folder)

    def _write_hidden(
        self, path: Path, pieces: Iterable[bytes | memoryview], *, recycle: bool = False
    ) -> tuple[int, str]:
        checksum = xxhash.xxh3_128()
        try:
            descriptor = self._open_hidden(path, recycle=recycle)
        except OSError as error:
            raise _space(error, path, 0) from error
        memory = recycle and self._spares is not None
        # A disk is not faster with threads; memory is.
        writer = Writer(descriptor, threads=_MEMORY_THREADS if memory else 0)
        try:
            for piece in pieces:
                view = memoryview(piece).cast("B") if piece else memoryview(b"")
                # In pieces that stay in the cache between hashing and writing.
                for start in range(0, view.nbytes, _PIECE_BYTES):
                    part = view[start : start + _PIECE_BYTES]
                    checksum.update(part)
                    self._on_step(f"write {path.name}")
                    writer.append(part)
            writer.finish()
            os.ftruncate(descriptor, writer.size_bytes)  # a spare may have been longer
            if self._sync:
                self._on_step(f"sync {path.name}")
                os.fsync(descriptor)
        except OSError as error:
            raise _space(error, path, writer.size_bytes) from error
        finally:
            writer.close()
            os.close(descriptor)
        return writer.size_bytes, checksum.hexdigest()

    def _open_hidden(self, path: Path, *, recycle: bool) -> int:
        # A rank that was killed and started again writes its files anew.
        path.unlink(missing_ok=True)
        if recycle and self._spares is not None:
            self._on_step("take spare")
            descriptor = self._spares.take(path)
            if descriptor is not None:
                return descriptor
        self._on_step(f"open {path.name}")
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)

    def _reveal(self, hidden: Path, final: Path) -> None:
        self._on_step(f"rename {hidden.name}")
        hidden.rename(final)
        self._sync_folder(self.folder)

    def _sync_folder(self, folder: Path) -> None:
        if not self._sync:
            return
        self._on_step(f"sync folder {'version' if folder == self.folder else 'run'}")
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def path_of(uri: str) -> Path:
    """Return the path of a `file://` URI or of a plain absolute path.

    Raises:
        ValueError: another scheme, another host, or a relative path.
    """
    parts = urlsplit(uri)
    path = Path(unquote(parts.path) if parts.scheme else uri)
    if parts.scheme not in ("", "file") or parts.netloc or not path.is_absolute():
        raise ValueError(
            f"expected file:///absolute/path or /absolute/path, found {uri!r}; "
            "other kinds of stores are not built in"
        )
    return path


def _remove_tree(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        # A publisher that was fenced and does not know it yet still writes there: the next sweep's.
        if error.errno != errno.ENOTEMPTY:
            raise


def _space(error: OSError, path: Path, written_bytes: int) -> Exception:
    if error.errno not in _SPACE_ERRNOS:
        return error
    return StoreFull(
        f"no space left at {path} after {written_bytes} bytes. Free space there, keep fewer "
        "versions (keep_latest), or move the store; then publish again"
    )
