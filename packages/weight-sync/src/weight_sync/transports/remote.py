"""A client of the FileService for threads: the calls run on the event loop, the caller waits."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import grpc
import xxhash
from service_kit.errors import NotFound, ServiceError
from service_kit.streams import with_idle_deadline
from tailrace.weight_sync.v1 import file_service_pb2 as pb
from tailrace.weight_sync.v1 import file_service_pb2_grpc as pb_grpc

from weight_sync.errors import PayloadMissing, TransportFailed
from weight_sync.files import VersionFile
from weight_sync.transports.landing import landing

_TRIES = 4
_FIRST_WAIT_S = 0.1
T = TypeVar("T")
Take = Callable[[bytes, int], None]
"""Called with each piece and its offset."""


class RemoteFiles:
    """The files of versions that another process serves. Call from threads, not from the loop."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        loop: asyncio.AbstractEventLoop,
        *,
        where: str,
        call_timeout_s: float,
        idle_timeout_s: float,
        streams: int = 2,
    ) -> None:
        """Use a channel of that loop.

        Args:
            channel: to the server.
            loop: the one the channel belongs to; it must run.
            where: names the server in errors.
            call_timeout_s: of listing.
            idle_timeout_s: longest silence while reading.
            streams: parallel streams for one file.
        """
        self._stub = pb_grpc.FileServiceStub(channel)
        self._loop = loop
        self._where = where
        self._call_timeout_s = call_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._streams = streams

    def files(self, run: str, number: int) -> list[VersionFile]:
        """List a version's files.

        Raises:
            PayloadMissing: it has none of them.
            TransportFailed: it cannot be reached.
        """
        return self._wait(self._list(run, number))

    def read(self, run: str, number: int, name: str) -> bytes:
        """Return the whole of a small file."""
        found = bytearray()

        def take(data: bytes, _offset: int) -> None:
            found.extend(data)

        self._wait(self._read(pb.ReadFileRequest(run=run, number=number, name=name), take))
        return bytes(found)

    def fetch(self, run: str, number: int, file: VersionFile, into: Path) -> None:
        """Put a file at `into`, by parallel ranges.

        Raises:
            PayloadMissing, TransportFailed: as for `files`.
            StoreFull: no space is left.
        """
        with landing(into, file.size_bytes) as landed:
            self._wait(self._ranges(run, number, file, landed.fileno()))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(self._told(work), self._loop).result()

    async def _told(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except NotFound as error:
            raise PayloadMissing(f"{self._where}: {error.message}") from error
        except ServiceError as error:
            raise TransportFailed(f"{self._where}: {error}") from error

    async def _list(self, run: str, number: int) -> list[VersionFile]:
        response = await self._stub.ListFiles(
            pb.ListFilesRequest(run=run, number=number), timeout=self._call_timeout_s
        )
        return [VersionFile(file.name, file.size_bytes) for file in response.files]

    async def _ranges(self, run: str, number: int, file: VersionFile, descriptor: int) -> None:
        share = -(-file.size_bytes // self._streams) or 1

        def take(data: bytes, offset: int) -> None:
            # Here and not in a thread: a write that outlived its file would land in another.
            _write_at(descriptor, data, offset)

        work = []
        for start in range(0, file.size_bytes, share):
            length = min(share, file.size_bytes - start)
            request = pb.ReadFileRequest(
                run=run, number=number, name=file.name, offset=start, length=length
            )
            work.append(asyncio.ensure_future(self._read(request, take)))
        try:
            await asyncio.gather(*work)
        finally:
            for task in work:
                task.cancel()

    async def _read(self, request: pb.ReadFileRequest, take: Take) -> None:
        """Read a range to its end, opening another stream wherever one breaks off."""
        offset, ends = request.offset, request.offset + request.length
        failures = 0
        while failures < _TRIES:
            rest = pb.ReadFileRequest()
            rest.CopyFrom(request)
            rest.offset = offset
            rest.length = ends - offset if request.length else 0
            try:
                stream = self._stub.ReadFile(rest)
                what = f"ReadFile of {self._where}"
                async for piece in with_idle_deadline(stream, self._idle_timeout_s, what):
                    if piece.offset != offset or _checksum(piece.data) != piece.checksum:
                        break  # torn on its way: read it again
                    take(piece.data, offset)
                    offset += len(piece.data)
                    failures = 0
                else:
                    if not request.length or offset == ends:
                        return
            except NotFound:
                raise
            except ServiceError as error:
                if not error.retryable or failures == _TRIES - 1:
                    raise
            await asyncio.sleep(_FIRST_WAIT_S * 2**failures)
            failures += 1
        raise TransportFailed(
            f"{self._where}: {request.name} of version {request.number} broke off at byte "
            f"{offset} {_TRIES} times in a row. Try another transport"
        )


def _checksum(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view.nbytes:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
