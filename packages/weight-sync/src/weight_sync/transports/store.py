"""Payloads out of whatever store a manifest's URI names."""

from pathlib import Path

from weight_sync.core.manifest import Manifest, PayloadFile
from weight_sync.stores import open_store
from weight_sync.stores.folder import FolderStore
from weight_sync.transports.base import Fetched, Transport
from weight_sync.transports.file import FileTransport


class StoreTransport:
    """Links or copies out of folders, downloads from object stores."""

    def __init__(self) -> None:
        self._by_root: dict[str, Transport] = {}

    def read_manifest(self, uri: str) -> Manifest:
        """Read it from its store."""
        return self._of(uri).read_manifest(uri)

    def fetch(
        self, manifest_uri: str, payload: PayloadFile, into: Path, *, read: bool = False
    ) -> Fetched:
        """Fetch it from its store."""
        return self._of(manifest_uri).fetch(manifest_uri, payload, into, read=read)

    def _of(self, manifest_uri: str) -> Transport:
        # ROOT/RUN/VERSION/manifest
        root = manifest_uri.rsplit("/", 3)[0]
        transport = self._by_root.get(root)
        if transport is None:
            store = open_store(root)
            if isinstance(store, FolderStore):
                transport = FileTransport()
            else:
                from weight_sync.stores.object_store import ObjectStore
                from weight_sync.transports.object_store import ObjectTransport

                assert isinstance(store, ObjectStore)
                transport = ObjectTransport(store)
            self._by_root = {root: transport}
        return transport
