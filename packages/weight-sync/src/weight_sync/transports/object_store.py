"""Payloads out of an object store, by ranges in parallel."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash

from weight_sync.core.manifest import Manifest, PayloadFile
from weight_sync.stores.object_store import ObjectStore
from weight_sync.transports.base import Fetched
from weight_sync.transports.file import check_checksum, check_size
from weight_sync.transports.landing import landing

_RANGE_BYTES = 16 << 20


class ObjectTransport:
    """Downloads payloads from one store. Holds `streams` ranges of 16 MiB in memory at most."""

    def __init__(self, store: ObjectStore, *, streams: int = 4) -> None:
        self._store = store
        self._streams = streams

    def read_manifest(self, uri: str) -> Manifest:
        """Get the manifest."""
        return self._store.read_manifest(uri)

    def fetch(
        self, manifest_uri: str, payload: PayloadFile, into: Path, *, read: bool = False
    ) -> Fetched:
        """Download ranges ahead and write them in order."""
        uri = f"{manifest_uri.rsplit('/', 1)[0]}/{payload.name}"
        hasher = xxhash.xxh3_128()
        starts = deque(range(0, payload.size_bytes, _RANGE_BYTES))
        ahead: deque[Future[bytes]] = deque()
        written = 0
        with landing(into, payload.size_bytes) as file, ThreadPoolExecutor(self._streams) as pool:
            while starts or ahead:
                while starts and len(ahead) < self._streams:
                    start = starts.popleft()
                    end = min(start + _RANGE_BYTES, payload.size_bytes)
                    ahead.append(pool.submit(self._store.read_range, uri, start, end))
                data = ahead.popleft().result()
                hasher.update(data)
                file.write(data)
                written += len(data)
            check_size(uri, written, payload)
            check_checksum(uri, hasher.hexdigest(), payload)
        return Fetched(into, payload.size_bytes)
