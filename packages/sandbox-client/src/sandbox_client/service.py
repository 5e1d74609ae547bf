"""The gRPC servicer: translate, call the manager, translate back."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, TypeVar

import grpc
from service_kit.server import Service
from service_kit.streams import with_heartbeat
from tailrace.sandbox.v1 import sandbox_service_pb2 as pb
from tailrace.sandbox.v1 import sandbox_service_pb2_grpc as pb_grpc

from sandbox_client import wire
from sandbox_client.backends.base import ExecHooks
from sandbox_client.config import SandboxServiceConfig
from sandbox_client.core.trees import is_digest
from sandbox_client.errors import TooLarge, WrongRequest
from sandbox_client.manager import SandboxManager
from sandbox_client.types import Command, ExecResult

__all__ = ["SERVICE_NAME", "SandboxServicer", "sandbox_service"]

logger = logging.getLogger(__name__)

SERVICE_NAME = "tailrace.sandbox.v1.SandboxService"

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")


def sandbox_service(manager: SandboxManager, config: SandboxServiceConfig) -> Service:
    """The service as a `Server` of service-kit takes it."""
    servicer = SandboxServicer(manager, config)
    return Service(SERVICE_NAME, partial(pb_grpc.add_SandboxServiceServicer_to_server, servicer))


class SandboxServicer(pb_grpc.SandboxServiceServicer):
    """SandboxService over one manager."""

    def __init__(self, manager: SandboxManager, config: SandboxServiceConfig) -> None:
        self._manager = manager
        self._config = config

    # -- environments

    async def PutEnvironment(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.PutEnvironmentRequest], context: Context
    ) -> pb.PutEnvironmentResponse:
        """Stores a tree under its digest."""
        requests = aiter(request_iterator)
        header = await _first(requests, lambda r: r.digest if r.HasField("digest") else None)
        if not is_digest(header):
            raise WrongRequest(
                f"digest must be 64 lower-case hexadecimal digits, found {header[:80]!r}"
            )
        if not self._manager.missing_environments([header]):
            return pb.PutEnvironmentResponse(stored=False)
        async with self._manager.spool.collected(r.tar_chunk async for r in requests) as archive:
            stored = await self._manager.put_environment(header, archive)
        return pb.PutEnvironmentResponse(stored=stored)

    async def MissingEnvironments(  # noqa: N802
        self, request: pb.MissingEnvironmentsRequest, context: Context
    ) -> pb.MissingEnvironmentsResponse:
        """Tells which environments have to be put."""
        missing = self._manager.missing_environments(list(request.digests))
        return pb.MissingEnvironmentsResponse(digests=missing)

    # -- images

    async def PrefetchImages(  # noqa: N802
        self, request: pb.PrefetchImagesRequest, context: Context
    ) -> pb.PrefetchImagesResponse:
        """Has images pulled ahead of time."""
        found = await self._manager.images().prefetch(list(request.images))
        return pb.PrefetchImagesResponse(images=[wire.image_to_proto(image) for image in found])

    async def TakeImagePull(  # noqa: N802
        self, request: pb.TakeImagePullRequest, context: Context
    ) -> pb.TakeImagePullResponse:
        """Gives another host one pull from the budget that is kept here."""
        await self._manager.images().take_pull()
        logger.info("another host pulls %s", request.image)
        return pb.TakeImagePullResponse()

    # -- creating and ending

    async def CreateSandbox(  # noqa: N802
        self, request: pb.CreateSandboxRequest, context: Context
    ) -> pb.CreateSandboxResponse:
        """Makes a sandbox, or finds the one of this key."""
        created = await self._manager.create(
            key=request.idempotency_key,
            owner=request.owner,
            spec=wire.spec_from_proto(request),
            lease_s=request.lease_s,
            labels=dict(request.labels),
        )
        return pb.CreateSandboxResponse(
            sandbox_id=created.sandbox_id,
            lease_s=created.lease_s,
            workdir=created.workdir,
            existed=created.existed,
        )

    async def RenewLeases(  # noqa: N802
        self, request: pb.RenewLeasesRequest, context: Context
    ) -> pb.RenewLeasesResponse:
        """Prolongs leases."""
        gone = self._manager.renew(
            list(request.sandbox_ids), request.lease_s, list(request.snapshot_ids)
        )
        return pb.RenewLeasesResponse(gone=gone)

    async def DestroySandbox(  # noqa: N802
        self, request: pb.DestroySandboxRequest, context: Context
    ) -> pb.DestroySandboxResponse:
        """Ends a sandbox."""
        existed = await self._manager.destroy(request.sandbox_id)
        return pb.DestroySandboxResponse(existed=existed)

    async def ListSandboxes(  # noqa: N802
        self, request: pb.ListSandboxesRequest, context: Context
    ) -> pb.ListSandboxesResponse:
        """Lists the living."""
        found = self._manager.sandboxes(request.owner or None)
        return pb.ListSandboxesResponse(sandboxes=[wire.info_to_proto(info) for info in found])

    # -- snapshots

    async def SnapshotSandbox(  # noqa: N802
        self, request: pb.SnapshotSandboxRequest, context: Context
    ) -> pb.SnapshotSandboxResponse:
        """Keeps a sandbox's files."""
        made = await self._manager.snapshot(
            request.sandbox_id, request.idempotency_key, request.lease_s
        )
        return wire.snapshot_to_proto(made)

    async def DestroySnapshot(  # noqa: N802
        self, request: pb.DestroySnapshotRequest, context: Context
    ) -> pb.DestroySnapshotResponse:
        """Ends a snapshot's lease."""
        existed = await self._manager.destroy_snapshot(request.snapshot_id)
        return pb.DestroySnapshotResponse(existed=existed)

    # -- commands

    async def Run(self, request: pb.RunRequest, context: Context) -> pb.RunResponse:  # noqa: N802
        """Runs one command and answers once."""
        result = await self._manager.run(
            request.command.sandbox_id, wire.command_from_proto(request.command)
        )
        return pb.RunResponse(
            stdout=result.stdout_bytes,
            stderr=result.stderr_bytes,
            ended=wire.ended_from_result(result),
        )

    async def Exec(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ExecRequest], context: Context
    ) -> AsyncIterator[pb.ExecResponse]:
        """Runs one command while input and output stream."""
        requests = aiter(request_iterator)
        first = await _first(requests, lambda r: r.command if r.HasField("command") else None)
        events = self._exec(first.sandbox_id, wire.command_from_proto(first), requests)
        async with contextlib.aclosing(  # type: ignore[type-var]
            with_heartbeat(
                events,
                self._config.exec.heartbeat_s,
                lambda: pb.ExecResponse(heartbeat=pb.ExecHeartbeat()),
            )
        ) as beating:
            async for event in beating:
                yield event

    async def _exec(
        self, sandbox_id: str, command: Command, requests: AsyncIterator[pb.ExecRequest]
    ) -> AsyncIterator[pb.ExecResponse]:
        output: asyncio.Queue[pb.ExecResponse | None] = asyncio.Queue()
        control = _ExecControl()
        streamed = {"stdout": 0, "stderr": 0}

        def on_output(stream: str, data: bytes) -> None:
            streamed[stream] += len(data)
            output.put_nowait(_output_event(stream, data))

        async def run() -> ExecResult:
            try:
                return await self._manager.run(
                    sandbox_id, command, ExecHooks(on_output, control.stdin(), control.killed)
                )
            finally:
                output.put_nowait(None)

        reading = asyncio.ensure_future(control.follow(requests))
        running = asyncio.ensure_future(run())
        try:
            yield pb.ExecResponse(started=pb.ExecStarted())
            while (event := await output.get()) is not None:
                yield event
            result = await running
            # The head has been sent as it came; the tail is known only now.
            for stream, kept in (("stdout", result.stdout_bytes), ("stderr", result.stderr_bytes)):
                for part in wire.chunks(kept[streamed[stream] :]):
                    yield _output_event(stream, part)
            yield pb.ExecResponse(ended=wire.ended_from_result(result))
        finally:
            running.cancel()
            reading.cancel()
            outcomes = await asyncio.gather(running, reading, return_exceptions=True)
            if isinstance(outcomes[1], WrongRequest):
                raise outcomes[1]

    # -- files

    async def WriteFiles(  # noqa: N802
        self, request: pb.WriteFilesRequest, context: Context
    ) -> pb.WriteFilesResponse:
        """Writes small files."""
        sandbox = self._manager.get(request.sandbox_id)
        await sandbox.write_files([wire.file_from_proto(file) for file in request.files])
        return pb.WriteFilesResponse()

    async def ReadFile(  # noqa: N802
        self, request: pb.ReadFileRequest, context: Context
    ) -> AsyncIterator[pb.ReadFileResponse]:
        """Streams a file's content."""
        limit = self._config.limits.upload_bytes
        max_bytes = min(request.max_bytes or limit, limit)
        sandbox = self._manager.get(request.sandbox_id)
        with await sandbox.read_file(request.path, max_bytes) as file:
            while chunk := file.read(wire.CHUNK_BYTES):
                yield pb.ReadFileResponse(chunk=chunk)

    async def UploadTree(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.UploadTreeRequest], context: Context
    ) -> pb.UploadTreeResponse:
        """Unpacks a tar in a sandbox."""
        requests = aiter(request_iterator)
        target = await _first(requests, lambda r: r.target if r.HasField("target") else None)
        sandbox = self._manager.get(target.sandbox_id)
        async with self._manager.spool.collected(r.tar_chunk async for r in requests) as archive:
            await sandbox.upload_tree(archive, target.path or ".")
        return pb.UploadTreeResponse()

    async def DownloadTree(  # noqa: N802
        self, request: pb.DownloadTreeRequest, context: Context
    ) -> AsyncIterator[pb.DownloadTreeResponse]:
        """Packs a folder of a sandbox into a tar."""
        sandbox = self._manager.get(request.sandbox_id)
        with self._manager.spool.file() as (archive, take):
            await sandbox.download_tree(request.path or ".", archive)
            take(archive.tell())
            archive.seek(0)
            while chunk := archive.read(wire.CHUNK_BYTES):
                yield pb.DownloadTreeResponse(tar_chunk=chunk)

    async def Diff(  # noqa: N802
        self, request: pb.DiffRequest, context: Context
    ) -> AsyncIterator[pb.DiffResponse]:
        """The work folder against its environment."""
        limit = self._config.limits.diff_bytes
        if not 0 <= request.max_bytes <= limit:
            raise WrongRequest(
                f"max_bytes must be between 0 and {limit} (limits.diff_bytes), found "
                f"{request.max_bytes}"
            )
        diff = await self._manager.get(request.sandbox_id).diff(request.max_bytes or limit)
        for chunk in wire.chunks(diff):
            yield pb.DiffResponse(chunk=chunk)

    async def ApplyPatch(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ApplyPatchRequest], context: Context
    ) -> pb.ApplyPatchResponse:
        """Applies a diff to the work folder."""
        requests = aiter(request_iterator)
        target = await _first(requests, lambda r: r.target if r.HasField("target") else None)
        limit = self._config.limits.diff_bytes
        patch = bytearray()
        async for request in requests:
            patch += request.chunk
            if len(patch) > limit:
                raise TooLarge(f"the patch is larger than {limit} bytes (limits.diff_bytes)")
        changed = await self._manager.get(target.sandbox_id).apply_patch(bytes(patch))
        return pb.ApplyPatchResponse(changed_paths=[wire.text(path) for path in changed])

    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        """Limits, gauges and missing protections."""
        return wire.status_to_proto(self._manager.status())


async def _first(requests: AsyncIterator[T], pick: Callable[[T], Any]) -> Any:
    """What the first message of a stream has to be."""
    async for request in requests:
        picked = pick(request)
        if picked is not None:
            return picked
        break
    raise WrongRequest("the stream's first message must name its target")


def _output_event(stream: str, data: bytes) -> pb.ExecResponse:
    if stream == "stdout":
        return pb.ExecResponse(stdout=data)
    return pb.ExecResponse(stderr=data)


class _ExecControl:
    """What a caller may send while its command runs: input, its end, and a kill."""

    def __init__(self) -> None:
        # Bounded: the caller waits while the command does not read.
        self._stdin: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=4)
        self.killed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def follow(self, requests: AsyncIterator[pb.ExecRequest]) -> None:
        async for request in requests:
            match request.WhichOneof("part"):
                case "stdin":
                    await self._stdin.put(request.stdin)
                case "stdin_eof":
                    await self._stdin.put(None)
                case "kill":
                    if not self.killed.done():
                        self.killed.set_result(None)
                case _:
                    raise WrongRequest("only the first message of Exec may be a command")
        await self._stdin.put(None)

    async def stdin(self) -> AsyncIterator[bytes]:
        while (part := await self._stdin.get()) is not None:
            yield part
