"""A receiver that tears, as update paths in the field have done: for the checker to catch.

It applies a version's files in place, takes a file that is not there for one that holds no changes,
and records the version when it is through. So with an index that is ahead of its files it serves

* the old weights under the new version, if the only file is not visible yet;
* half of the new weights, if one of two is not, and never looks again.
"""

from __future__ import annotations

from weight_sync.codecs import Tensor, delta_codec
from weight_sync.core.manifest import Manifest, digest
from weight_sync.model_files import mapped
from weight_sync.stores import FolderStore
from weight_sync.stores.folder import path_of


class TornReceiver:
    """One engine's weights, updated in place from a store."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.label = "default"
        self._tensors = tensors

    def load(self, tensors: dict[str, Tensor], label: str) -> None:
        """Take a whole version."""
        self.label, self._tensors = label, tensors

    def pull(self, store: FolderStore, uri: str) -> None:
        """Bring the weights from the version before to the one at `uri`."""
        manifest: Manifest = store.read_manifest(uri)
        if manifest.version.label == self.label:
            return
        for payload in manifest.payloads:
            path = path_of(uri).parent / payload.name
            if path.exists():
                delta_codec(manifest.codec).apply(mapped(path), self._tensors)
        self.label = manifest.version.label

    def checksums(self) -> dict[str, str]:
        """Return what it holds."""
        return {name: digest(tensor.data) for name, tensor in self._tensors.items()}
