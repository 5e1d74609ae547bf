"""Which files of versions this process can hand to others, and the servicer that does."""

import asyncio
import io
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import grpc
import xxhash
from tailrace.weight_sync.v1 import file_service_pb2 as pb
from tailrace.weight_sync.v1 import file_service_pb2_grpc as pb_grpc

from weight_sync.errors import PayloadMissing, WeightSyncError
from weight_sync.failures import service_failure
from weight_sync.state import VersionLog
from weight_sync.stores import Store

SERVICE_NAME = "tailrace.weight_sync.v1.FileService"
MANIFEST = "manifest"
COPY = "copy/"
"""Before the names of model files of a receiver's verified copy."""

_CHUNK_BYTES = (1 << 20) - (1 << 10)
"""A message stays below 1 MiB with its other fields."""

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class VersionFile:
    """A file that can be read."""

    name: str
    size_bytes: int


class FileSource(Protocol):
    """Files of versions. Methods block."""

    def files(self, run: str, number: int) -> list[VersionFile]:
        """List a version's files; none: the version is not here."""
        ...

    def open(self, run: str, number: int, name: str) -> BinaryIO | None:
        """Open one of them; None: it is not here."""
        ...


class StoreFiles:
    """Manifests and payloads of announced versions, out of the store."""

    def __init__(self, log: VersionLog, store: Store) -> None:
        self._log = log
        self._store = store

    def files(self, run: str, number: int) -> list[VersionFile]:
        """List the manifest and the payloads."""
        uri = self._uri(run, number)
        if uri is None:
            return []
        try:
            data = self._store.read_bytes(uri)
            payloads = self._store.read_manifest(uri).payloads
        except PayloadMissing:
            return []
        sizes = [VersionFile(payload.name, payload.size_bytes) for payload in payloads]
        return [VersionFile(MANIFEST, len(data)), *sizes]

    def open(self, run: str, number: int, name: str) -> BinaryIO | None:
        """Open the manifest or a payload; nothing else of the store can be named."""
        uri = self._uri(run, number)
        if uri is None:
            return None
        if name == MANIFEST:
            return self._store.open(uri)
        if all(name != payload.name for payload in self._store.read_manifest(uri).payloads):
            return None
        return self._store.open(f"{uri.rsplit('/', 1)[0]}/{name}")

    def _uri(self, run: str, number: int) -> str | None:
        announced = self._log.find(run, number)
        return announced.manifest_uri if announced else None


class CopyFiles:
    """Manifest and model files of the copies that a receiver holds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[tuple[str, int], tuple[bytes, Path]] = {}

    def keep_only(self, run: str, number: int, manifest: bytes, folder: Path) -> None:
        """Offer this copy and no other."""
        with self._lock:
            self._copies = {(run, number): (manifest, folder)}

    @property
    def numbers(self) -> list[int]:
        """The versions at hand."""
        return sorted(number for _, number in self._copies)

    def files(self, run: str, number: int) -> list[VersionFile]:
        """List the manifest and the model files."""
        found = self._copies.get((run, number))
        if found is None:
            return []
        manifest, folder = found
        models = [
            VersionFile(COPY + path.name, path.stat().st_size)
            for path in sorted(folder.glob("*.safetensors"))
        ]
        return [VersionFile(MANIFEST, len(manifest)), *models]

    def open(self, run: str, number: int, name: str) -> BinaryIO | None:
        """Open the manifest or a model file."""
        found = self._copies.get((run, number))
        if found is None:
            return None
        if name == MANIFEST:
            return io.BytesIO(found[0])
        if all(name != file.name for file in self.files(run, number)):
            return None
        return (found[1] / name.removeprefix(COPY)).open("rb")


class FileServicer(pb_grpc.FileServiceServicer):
    """Serves the files of several sources as one."""

    def __init__(self, sources: Sequence[FileSource]) -> None:
        self._sources = sources

    async def ListFiles(  # noqa: N802
        self, request: pb.ListFilesRequest, context: Context
    ) -> pb.ListFilesResponse:
        """List a version's files, each name once."""
        found: dict[str, int] = {}
        for source in self._sources:
            for file in await asyncio.to_thread(source.files, request.run, request.number):
                found.setdefault(file.name, file.size_bytes)
        if not found:
            raise _not_here(request.run, request.number, "no file of it")
        return pb.ListFilesResponse(
            files=[pb.VersionFile(name=n, size_bytes=size) for n, size in found.items()]
        )

    async def ReadFile(  # noqa: N802
        self, request: pb.ReadFileRequest, context: Context
    ) -> AsyncIterator[pb.ReadFileResponse]:
        """Stream a file from an offset on, each piece with its checksum."""
        file = await asyncio.to_thread(self._open, request)
        try:
            await asyncio.to_thread(file.seek, request.offset)
            offset, left = request.offset, request.length or (1 << 62)
            while left:
                data = await asyncio.to_thread(file.read, min(left, _CHUNK_BYTES))
                if not data and request.length:
                    why = f"no byte {offset} of {request.name!r}"
                    raise _not_here(request.run, request.number, why)
                if not data:
                    return
                yield pb.ReadFileResponse(
                    offset=offset, data=data, checksum=xxhash.xxh3_64_intdigest(data)
                )
                offset += len(data)
                left -= len(data)
        finally:
            file.close()

    def _open(self, request: pb.ReadFileRequest) -> BinaryIO:
        try:
            for source in self._sources:
                file = source.open(request.run, request.number, request.name)
                if file is not None:
                    return file
        except (WeightSyncError, FileNotFoundError) as error:
            raise _not_here(request.run, request.number, str(error)) from error
        raise _not_here(request.run, request.number, f"no file {request.name!r}")


def _not_here(run: str, number: int, why: str) -> Exception:
    return service_failure(
        PayloadMissing(
            f"run {run}: version {number}: {why} is here: it was pruned, or never was here. Go to "
            "the newest version, or ask elsewhere"
        )
    )
