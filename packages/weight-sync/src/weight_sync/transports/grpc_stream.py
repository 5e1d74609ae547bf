"""The fallback that always works: payloads over the connection to the WeightService's process.

It costs about 4 CPU-seconds a GB at both ends together; for hosts that reach no store.
"""

from pathlib import Path

from weight_sync.core.manifest import Manifest, PayloadFile
from weight_sync.errors import ManifestError
from weight_sync.files import MANIFEST, VersionFile
from weight_sync.stores.base import check_manifest, parse_version
from weight_sync.transports.base import Fetched
from weight_sync.transports.file import check_checksum, file_checksum
from weight_sync.transports.remote import RemoteFiles


class GrpcTransport:
    """Reads manifests and payloads from a FileService."""

    def __init__(self, files: RemoteFiles) -> None:
        self._files = files

    def read_manifest(self, uri: str) -> Manifest:
        """Ask for the manifest, and compare it with the id in its URI."""
        return check_manifest(uri, lambda uri: self._files.read(*_version(uri), MANIFEST))

    def fetch(
        self, manifest_uri: str, payload: PayloadFile, into: Path, *, read: bool = False
    ) -> Fetched:
        """Read the payload by parallel streams."""
        run, number = _version(manifest_uri)
        self._files.fetch(run, number, VersionFile(payload.name, payload.size_bytes), into)
        try:
            check_checksum(f"{payload.name} by gRPC", file_checksum(into), payload)
        except BaseException:
            into.unlink()
            raise
        return Fetched(into, payload.size_bytes)


def _version(uri: str) -> tuple[str, int]:
    """Return run and number of a manifest's URI: .../RUN/NUMBER-INCARNATION/manifest-<id>.json."""
    parts = uri.split("/")
    version = parse_version(parts[-2]) if len(parts) >= 3 else None
    if version is None:
        raise ManifestError(f"expected a URI of a version's manifest, found {uri!r}")
    return parts[-3], version[0]
