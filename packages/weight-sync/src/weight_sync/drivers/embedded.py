"""The driver of engines that speak SGLang's HTTP API and name tensors as the checkpoint does."""

from collections.abc import Mapping
from pathlib import Path

from weight_sync.core.manifest import Manifest
from weight_sync.drivers.http_engine import HttpEngine


class EmbeddedDriver(HttpEngine):
    """One embedded engine. Its checksums are the manifest's own."""

    async def expected_checksums(
        self, manifest: Manifest, folder: Path | None
    ) -> Mapping[str, str]:
        """Return the checkpoint's names with the manifest's xxh3-128."""
        return {entry.name: entry.checksum for entry in manifest.tensors}
