"""Where the manifests and payloads of versions stand."""

from weight_sync.stores.base import Publication, Store
from weight_sync.stores.folder import FolderStore

__all__ = ["FolderStore", "Publication", "Store", "open_store"]


def open_store(uri: str) -> Store:
    """Open the store that a `store_uri` names: a folder's path, or `file://` and a path.

    Raises:
        ValueError: another scheme.
    """
    return FolderStore.from_uri(uri)
