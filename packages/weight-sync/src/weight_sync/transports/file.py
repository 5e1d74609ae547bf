"""Payloads over a file system that publisher and receiver share: `/dev/shm`, NFS, ..."""

import errno
import os
from pathlib import Path

from weight_sync.core.manifest import PayloadFile
from weight_sync.errors import ChecksumMismatch, PayloadMissing
from weight_sync.model_files import copy_file
from weight_sync.stores.folder import path_of
from weight_sync.transports.base import Fetched

_NO_LINK_ERRNOS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)


class FileTransport:
    """Hard-links a payload where the file system allows it, copies it elsewhere.

    A link costs nothing and keeps the bytes alive after the publisher has pruned the version.
    """

    def fetch(self, manifest_uri: str, payload: PayloadFile, into: Path) -> Fetched:
        """Link or copy the payload that stands beside its manifest."""
        source = path_of(manifest_uri).parent / payload.name
        try:
            found_bytes = source.stat().st_size
            if found_bytes != payload.size_bytes:
                raise ChecksumMismatch(
                    f"{source}: expected {payload.size_bytes} bytes, found {found_bytes}. Fetch "
                    "it again; if it stays, publish the version again"
                )
            moved_bytes = _link_or_copy(source, into)
        except FileNotFoundError as error:
            raise PayloadMissing(
                f"{source} is named by its manifest but not there: pruned, or not visible on "
                "this host. Go to the newest version"
            ) from error
        return Fetched(into, moved_bytes)


def _link_or_copy(source: Path, into: Path) -> int:
    try:
        os.link(source, into)
    except OSError as error:
        if error.errno not in _NO_LINK_ERRNOS:
            raise
    else:
        return 0
    copy_file(source, into)
    return into.stat().st_size
