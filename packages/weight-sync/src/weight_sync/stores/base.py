"""What a store is: versions appear in it whole, or not at all."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from weight_sync.core.manifest import Manifest, PayloadFile


@dataclass(frozen=True, slots=True)
class Committed:
    """A version whose manifest is in the store."""

    run: str
    number: int
    incarnation: int
    manifest_uri: str


class Publication(Protocol):
    """One version being written; invisible until `commit` returns."""

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> PayloadFile:
        """Write one payload file durably and return its line in the manifest.

        Args:
            name: a plain file name without its checksum, which the store adds.
            pieces: the file's bytes, in order.

        Raises:
            StoreFull: no space is left.
        """
        ...

    def commit(self, manifest: Manifest) -> str:
        """Write the manifest, the commit point, and return its URI."""
        ...

    def abandon(self) -> None:
        """Remove what was written; the version was never there."""
        ...


class Store(Protocol):
    """A place for versions. One writer a run and incarnation, any number of readers."""

    @property
    def uri(self) -> str:
        """What `open_store` opens this store by."""
        ...

    def begin(self, run: str, number: int, incarnation: int) -> Publication:
        """Start writing a version."""
        ...

    def read_manifest(self, uri: str) -> Manifest:
        """Read a committed manifest and compare it with its content address.

        Raises:
            PayloadMissing: it is not there.
            ManifestError: it is not what its name says.
        """
        ...

    def committed(self, run: str) -> list[Committed]:
        """Return the run's committed versions, oldest first."""
        ...

    def last_number(self, run: str) -> int:
        """Return the highest number that any version of the run has here, finished or not."""
        ...

    def remove(self, version: Committed) -> None:
        """Delete a version: first its manifest, so that no reader sees half of it."""
        ...

    def sweep(self, run: str, *, before_incarnation: int) -> int:
        """Delete what publishers of fenced incarnations left unfinished; return how many."""
        ...
