"""What a transport is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from weight_sync.core.manifest import PayloadFile


@dataclass(frozen=True, slots=True)
class Fetched:
    """A payload on this host."""

    path: Path
    moved_bytes: int
    """Bytes copied to get it here; 0 when the file itself is shared."""


class Transport(Protocol):
    """Brings a payload file to this host."""

    def fetch(self, manifest_uri: str, payload: PayloadFile, into: Path) -> Fetched:
        """Put the payload at `into`, which must not exist, and check its size.

        Its checksum is not compared here: what counts is that of the tensors it decodes to.

        Raises:
            PayloadMissing: the manifest names a file that is not there.
            ChecksumMismatch: its size is not the manifest's.
            StoreFull: no space is left at `into`.
        """
        ...
