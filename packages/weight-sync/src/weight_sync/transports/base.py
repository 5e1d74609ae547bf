"""What a transport is."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from weight_sync.core.manifest import Manifest, PayloadFile
from weight_sync.errors import StoreFull
from weight_sync.types import AnnouncedVersion


@dataclass(frozen=True, slots=True)
class Fetched:
    """A payload on this host."""

    path: Path
    moved_bytes: int
    """Bytes copied to get it here; 0 when the file itself is shared."""


class Transport(Protocol):
    """Brings manifests and payload files to this host. Methods block."""

    def read_manifest(self, uri: str) -> Manifest:
        """Read a manifest and compare it with the id in its URI.

        Raises:
            PayloadMissing: it is not there.
            ManifestError: it is not what its name says.
        """
        ...

    def fetch(
        self, manifest_uri: str, payload: PayloadFile, into: Path, *, read: bool = False
    ) -> Fetched:
        """Put the payload at `into`, which must not exist.

        Its size is checked, and the checksum of whatever was moved. A shared file is not read here
        unless `read` says so: what counts is the checksums of the tensors that it decodes to.

        Raises:
            PayloadMissing: the manifest names a file that is not there.
            ChecksumMismatch: size or checksum is not the manifest's.
            TransportFailed: it did not arrive.
            StoreFull: no space is left at `into`.
        """
        ...


class Sender(Protocol):
    """The publisher's side of a transport that pushes."""

    def open(self, manifest_uri: str, manifest: Manifest) -> None:
        """Get ready to offer a version that is about to be announced. Blocks."""
        ...

    def start(self, manifest_uri: str, manifest: Manifest) -> None:
        """Offer it, in the background; it has been announced. A failure is no error."""
        ...


class ModelSource(Protocol):
    """Hands over whole models that others have decoded and verified already. Blocks."""

    def fetch_model(self, announced: AnnouncedVersion, into: Path) -> Sequence[Path]:
        """Put the version's model files into a folder; none: nobody has them.

        The caller verifies every tensor: a peer is believed as little as a disk.
        """
        ...


def no_space(into: Path) -> StoreFull:
    """Return the error of a receiver's full disk."""
    return StoreFull(
        f"no space left for the shadow copy at {into}. Free space there, or set "
        "receiver.shadow_folder to another disk"
    )
