"""A store in a bucket, or in any other file system that fsspec reaches: `s3://BUCKET/PREFIX`, ...

    ROOT/RUN/0000000012-0003/model.safetensors      payloads, under the names they were given
    ROOT/RUN/0000000012-0003/manifest-<id>.json     put last: the version exists from here on

An object store has no rename and needs none: an object appears whole when its upload completes, or
not at all. A payload's name is not its checksum, which is known only when the last part is sent;
nobody else writes under this number and incarnation. Before the manifest is put, every payload is
looked up: an upload that was lost or cut short is no version. The manifest is one single put, named
by its content, so a repeated put changes nothing.

What a killed publisher leaves: objects without a manifest, which `sweep` deletes, and parts of an
upload that was never completed, which no listing shows; give the bucket a lifecycle rule that
aborts incomplete multipart uploads after a day.
"""

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, cast

import fsspec
import xxhash

from weight_sync.core.manifest import Manifest, PayloadFile
from weight_sync.errors import ChecksumMismatch, PayloadMissing, StoreFull
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

_PART_BYTES = 32 << 20
_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


class ObjectStore:
    """Versions under one prefix. See the module's docstring for the layout.

    Credentials and endpoints are fsspec's: `FSSPEC_S3_ENDPOINT_URL` and others in the environment,
    files in `~/.config/fsspec`, or those of the cloud's own library.
    """

    def __init__(self, uri: str, *, part_bytes: int = _PART_BYTES, on_step: Step = no_step) -> None:
        """Use a prefix of a bucket.

        Args:
            uri: `s3://bucket/prefix`, or another URL of fsspec's.
            part_bytes: uploads go in parts of this size; S3 wants at least 5 MiB.
            on_step: called before every put and delete.

        Raises:
            ValueError: fsspec has no such scheme.
        """
        self._uri = uri.rstrip("/")
        scheme = self._uri.split("://", 1)[0]
        # A listing that is remembered would hide what another publisher did since.
        self._fs: Any = fsspec.filesystem(
            scheme, use_listings_cache=False, skip_instance_cache=True
        )
        self._root: str = self._fs._strip_protocol(self._uri)
        self._part_bytes = part_bytes
        self._on_step = on_step

    @property
    def uri(self) -> str:
        """The prefix's URL."""
        return self._uri

    def begin(self, run: str, number: int, incarnation: int) -> "ObjectPublication":
        """Start writing a version under a prefix of its own.

        Raises:
            FileExistsError: something is there already.
        """
        publication = self.join(run, number, incarnation)
        if self._files(publication.prefix):
            raise FileExistsError(f"{publication.prefix} is in use; publish under the next number")
        return publication

    def join(self, run: str, number: int, incarnation: int) -> "ObjectPublication":
        """Write to a version that another process began."""
        prefix = f"{self._root}/{run}/{version_name(number, incarnation)}"
        return ObjectPublication(self, prefix)

    def read_manifest(self, uri: str) -> Manifest:
        """Read a manifest and compare it with the id in its name."""
        return check_manifest(uri, self.read_bytes)

    def read_bytes(self, uri: str) -> bytes:
        """Get an object."""
        try:
            return bytes(self._fs.cat_file(self._path(uri)))
        except FileNotFoundError as error:
            raise _missing(uri) from error

    def read_range(self, uri: str, start: int, end: int) -> bytes:
        """Get bytes `start` to `end` of an object; fewer where it ends before.

        Raises:
            PayloadMissing: it is not there.
        """
        try:
            return bytes(self._fs.cat_file(self._path(uri), start=start, end=end))
        except FileNotFoundError as error:
            raise _missing(uri) from error

    def open(self, uri: str) -> BinaryIO:
        """Open an object; it is read as it is needed."""
        try:
            return cast(BinaryIO, self._fs.open(self._path(uri), "rb", cache_type="readahead"))
        except FileNotFoundError as error:
            raise _missing(uri) from error

    def committed(self, run: str) -> list[Committed]:
        """Return the committed versions; prefixes without a manifest are not there."""
        return [
            Committed(run, number, incarnation, self._fs.unstrip_protocol(path))
            for number, incarnation, path in self._objects(run)
            if is_manifest(_name(path))
        ]

    def last_number(self, run: str) -> int:
        """Return the highest number in use, torn versions included."""
        return max((number for number, _, _ in self._objects(run)), default=0)

    def remove(self, version: Committed) -> None:
        """Delete a version's objects, its manifest first."""
        manifest = self._path(version.manifest_uri)
        self._delete(manifest)
        for path in self._files(manifest.rsplit("/", 1)[0]):
            self._delete(path)

    def sweep(self, run: str, *, before_incarnation: int) -> int:
        """Delete unfinished versions of incarnations before this one."""
        objects = self._objects(run)
        whole = {(n, i) for n, i, path in objects if is_manifest(_name(path))}
        torn = [o for o in objects if o[1] < before_incarnation and o[:2] not in whole]
        for _, _, path in torn:
            self._delete(path)
        return len({o[:2] for o in torn})

    def _objects(self, run: str) -> list[tuple[int, int, str]]:
        found = []
        for path in self._files(f"{self._root}/{run}"):
            version = parse_version(path.rsplit("/", 2)[-2])
            if version:
                found.append((*version, path))
        return sorted(found)

    def _files(self, prefix: str) -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(self._fs.find(prefix))
        return []

    def _delete(self, path: str) -> None:
        self._on_step(f"delete {_kind(path)}")
        with suppress(FileNotFoundError):
            self._fs.rm_file(path)

    def _path(self, uri: str) -> str:
        return str(self._fs._strip_protocol(uri))

    def _upload(self, path: str, pieces: Iterable[bytes | memoryview]) -> tuple[int, str]:
        """Write an object that appears whole at the end, and return its size and checksum."""
        hasher = xxhash.xxh3_128()
        size_bytes = 0
        self._on_step(f"upload {_kind(path)}")
        try:
            self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)  # where a prefix is a folder
            with self._opened(path) as file:
                for piece in pieces:
                    view = memoryview(piece).cast("B") if piece else memoryview(b"")
                    for start in range(0, view.nbytes, self._part_bytes):
                        part = view[start : start + self._part_bytes]
                        hasher.update(part)
                        file.write(part)
                        self._on_step(f"sent part of {_kind(path)}")
                    size_bytes += view.nbytes
                file.close()
                self._on_step(f"complete {_kind(path)}")
                file.commit()
        except OSError as error:
            raise _space(error, path) from error
        return size_bytes, hasher.hexdigest()

    @contextmanager
    def _opened(self, path: str) -> Iterator[Any]:
        file = self._fs.open(path, "wb", block_size=self._part_bytes, autocommit=False)
        try:
            yield file
        except BaseException:
            file.discard()
            # Some close themselves when they are collected, and would complete what is not.
            with suppress(AttributeError):
                file.closed = True
            raise

    def _size(self, path: str) -> int:
        try:
            return int(self._fs.info(path)["size"])
        except FileNotFoundError as error:
            raise _missing(path) from error


class ObjectPublication:
    """One version's prefix while it is written."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self.prefix = prefix
        self._store = store

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> PayloadFile:
        """Upload a payload under its name."""
        return PayloadFile(name, *self._store._upload(f"{self.prefix}/{name}", pieces))

    def write_note(self, name: str, data: bytes) -> None:
        """Put a note."""
        self._store._upload(f"{self.prefix}/{name}", [data])

    def read_note(self, name: str) -> bytes | None:
        """Get a note."""
        try:
            return self._store.read_bytes(f"{self.prefix}/{name}")
        except PayloadMissing:
            return None

    def commit(self, manifest: Manifest) -> str:
        """Look every payload up, then put the manifest.

        Raises:
            PayloadMissing: a payload is not there.
            ChecksumMismatch: one has another size than was sent.
        """
        for payload in manifest.payloads:
            found = self._store._size(f"{self.prefix}/{payload.name}")
            if found != payload.size_bytes:
                raise ChecksumMismatch(
                    f"{self.prefix}/{payload.name}: sent {payload.size_bytes} bytes, the store "
                    f"holds {found}. Publish the version again"
                )
        data = manifest.to_bytes()
        path = f"{self.prefix}/{manifest_name(data)}"
        self._store._upload(path, [data])
        return str(self._store._fs.unstrip_protocol(path))

    def abandon(self) -> None:
        """Delete what was uploaded."""
        for path in self._store._files(self.prefix):
            self._store._delete(path)


def _name(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def _kind(path: str) -> str:
    """Name a step by what it writes, the same for every version."""
    return "manifest" if is_manifest(_name(path)) else _name(path)


def _missing(uri: str) -> PayloadMissing:
    return PayloadMissing(f"no object at {uri}: it was pruned. Go to the newest version")


def _space(error: OSError, path: str) -> Exception:
    if error.errno not in _SPACE_ERRNOS:
        return error
    return StoreFull(
        f"no space left at {path}. Free space there, keep fewer versions (keep_latest), or move "
        "the store; then publish again"
    )
