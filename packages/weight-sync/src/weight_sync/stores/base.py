"""What a store is: versions appear in it whole, or not at all."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from weight_sync.core.manifest import Manifest, PayloadFile, digest
from weight_sync.errors import ManifestError

_VERSION = re.compile(r"(\d{10,})-(\d{4,})")
_MANIFEST = re.compile(r"manifest-([0-9a-f]{32})\.json")

Step = Callable[[str], None]
"""Called with the name of each step that changes a store, just before it is done."""


def no_step(step: str) -> None:
    """Ignore a step; tests put a crash here instead."""


def version_name(number: int, incarnation: int) -> str:
    """Return the name of a version's folder: two incarnations never share one."""
    return f"{number:010d}-{incarnation:04d}"


def parse_version(name: str) -> tuple[int, int] | None:
    """Return number and incarnation of a version's folder; None: it is none."""
    match = _VERSION.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def manifest_name(data: bytes) -> str:
    """Return the name of a manifest: its content's address."""
    return f"manifest-{digest(data)}.json"


def is_manifest(name: str) -> bool:
    """Whether a file is a manifest by its name."""
    return _MANIFEST.fullmatch(name) is not None


def check_manifest(uri: str, read: Callable[[str], bytes]) -> Manifest:
    """Read a manifest and compare it with the id in its name, whoever hands it over.

    Raises:
        ManifestError: it is not what its name says.
    """
    match = _MANIFEST.fullmatch(uri.rsplit("/", 1)[-1])
    if match is None:
        raise ManifestError(f"expected a URI ending in manifest-<id>.json, found {uri!r}")
    data = read(uri)
    if digest(data) != match[1]:
        raise ManifestError(
            f"{uri}: the content does not match the id in the name; it was cut off or "
            "changed after it was written. Publish the version again"
        )
    return Manifest.from_bytes(data)


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

    def write_note(self, name: str, data: bytes) -> None:
        """Write a small file that no manifest names, such as a rank's receipt, all or nothing."""
        ...

    def read_note(self, name: str) -> bytes | None:
        """Return a note; None: it is not there yet."""
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

    def join(self, run: str, number: int, incarnation: int) -> Publication:
        """Write to a version that another process began: each rank its own files."""
        ...

    def read_manifest(self, uri: str) -> Manifest:
        """Read a committed manifest and compare it with its content address.

        Raises:
            PayloadMissing: it is not there.
            ManifestError: it is not what its name says.
        """
        ...

    def read_bytes(self, uri: str) -> bytes:
        """Return the whole of a small file.

        Raises:
            PayloadMissing: it is not there.
        """
        ...

    def open(self, uri: str) -> BinaryIO:
        """Open a file of a version for reading; it can seek.

        Raises:
            PayloadMissing: it is not there.
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
