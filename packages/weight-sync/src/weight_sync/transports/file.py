"""Payloads over a file system that publisher and receiver share: `/dev/shm`, NFS, ..."""

import errno
import os
from pathlib import Path

import xxhash

from weight_sync.core.manifest import Manifest, PayloadFile
from weight_sync.errors import ChecksumMismatch, PayloadMissing
from weight_sync.stores.folder import FolderStore, path_of
from weight_sync.transports.base import Fetched, no_space

_NO_LINK_ERRNOS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)
_PIECE_BYTES = 1 << 20


class FileTransport:
    """Hard-links a payload where the file system allows it, copies it elsewhere.

    A link costs nothing and keeps the bytes alive after the publisher has pruned the version.
    """

    def read_manifest(self, uri: str) -> Manifest:
        """Read it from its folder."""
        return FolderStore(path_of(uri).parent.parent.parent).read_manifest(uri)

    def fetch(
        self, manifest_uri: str, payload: PayloadFile, into: Path, *, read: bool = False
    ) -> Fetched:
        """Link or copy the payload that stands beside its manifest; `read` a linked one too."""
        source = path_of(manifest_uri).parent / payload.name
        try:
            check_size(str(source), source.stat().st_size, payload)
            moved_bytes = _link_or_copy(source, payload, into)
            if read and not moved_bytes:
                check_checksum(str(source), file_checksum(into), payload)
        except FileNotFoundError as error:
            raise PayloadMissing(
                f"{source} is named by its manifest but not there: pruned, or not visible on "
                "this host. Go to the newest version"
            ) from error
        return Fetched(into, moved_bytes)


def check_size(where: str, found_bytes: int, payload: PayloadFile) -> None:
    """Compare a file's size with the manifest's.

    Raises:
        ChecksumMismatch: they differ.
    """
    if found_bytes != payload.size_bytes:
        raise ChecksumMismatch(
            f"{where}: expected {payload.size_bytes} bytes, found {found_bytes}. Fetch "
            "it again; if it stays, publish the version again"
        )


def check_checksum(where: str, found: str, payload: PayloadFile) -> None:
    """Compare a file's checksum with the manifest's.

    Raises:
        ChecksumMismatch: they differ.
    """
    if found != payload.checksum:
        raise ChecksumMismatch(
            f"{where}: expected checksum {payload.checksum}, found {found}. Fetch it again; if "
            "it stays, publish the version again"
        )


def file_checksum(path: Path) -> str:
    """Return the xxh3-128 of a file, in hex."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            hasher.update(piece)
    return hasher.hexdigest()


def _link_or_copy(source: Path, payload: PayloadFile, into: Path) -> int:
    try:
        os.link(source, into)
    except OSError as error:
        if error.errno not in _NO_LINK_ERRNOS:
            raise
    else:
        return 0
    hasher = xxhash.xxh3_128()
    try:
        with source.open("rb") as read, into.open("xb") as written:
            while piece := read.read(_PIECE_BYTES):
                hasher.update(piece)
                written.write(piece)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_space(into) from error
        raise
    check_checksum(str(source), hasher.hexdigest(), payload)
    return payload.size_bytes
