"""Where the manifests and payloads of versions stand."""

from weight_sync.errors import TransportUnavailable
from weight_sync.stores.base import Publication, Store
from weight_sync.stores.folder import FolderStore
from weight_sync.stores.memory import SCHEME as MEMORY_SCHEME
from weight_sync.stores.memory import MemoryStore

__all__ = ["FolderStore", "MemoryStore", "Publication", "Store", "open_store"]


def open_store(uri: str) -> Store:
    """Open the store that a `store_uri` names.

    A folder's path or `file://` and a path; `shm://NAME`: memory that this host's processes share;
    any other scheme is fsspec's, such as `s3://BUCKET/PREFIX`.

    Raises:
        ValueError: it names no store.
        TransportUnavailable: it needs the extra `object-store`.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme == "file":
        return FolderStore.from_uri(uri)
    if scheme == MEMORY_SCHEME:
        return MemoryStore(rest)
    try:
        from weight_sync.stores.object_store import ObjectStore

        return ObjectStore(uri)
    except ImportError as error:
        raise TransportUnavailable(
            f"{uri} needs {error.name}, which is not installed. Install weight-sync[object-store]"
        ) from error
