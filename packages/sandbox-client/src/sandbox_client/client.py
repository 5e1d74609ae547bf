"""The asynchronous client: sandboxes as objects, leases renewed, errors typed."""

import asyncio
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from service_kit.channel import Channel, ChannelConfig, open_channel
from service_kit.deadlines import Deadline
from service_kit.errors import DeadlineExceeded, ServiceError
from tailrace.sandbox.v1 import sandbox_service_pb2 as pb
from tailrace.sandbox.v1.sandbox_service_pb2_grpc import SandboxServiceStub

from sandbox_client import wire
from sandbox_client.connection import Connection, typed_errors
from sandbox_client.environments import EnvironmentTree
from sandbox_client.errors import EnvironmentUnknown, QuotaExhausted, WrongRequest
from sandbox_client.handle import OutputEvent, Sandbox, Snapshot
from sandbox_client.types import (
    EnvironmentRef,
    ImageStatus,
    SandboxInfo,
    SandboxLimits,
    SandboxSpec,
    ServiceStatus,
)

__all__ = ["OutputEvent", "Sandbox", "SandboxClient", "Snapshot"]

logger = logging.getLogger(__name__)

_SERVICE = "tailrace.sandbox.v1.SandboxService"
_IDEMPOTENT = tuple(
    f"{_SERVICE}/{method}"
    for method in (
        "MissingEnvironments",
        "PrefetchImages",
        "CreateSandbox",
        "RenewLeases",
        "DestroySandbox",
        "SnapshotSandbox",
        "DestroySnapshot",
        "ListSandboxes",
        "WriteFiles",
        "Diff",
        "GetStatus",
    )
)


class SandboxClient:
    """Talks to one sandbox service. Use it as an asynchronous context manager.

    Every method raises the errors of `sandbox_client.errors`; calls end within their deadline.

    Args:
        config: where the service is.
        owner: name under which sandboxes are created and listed.
        lease_s: lease of a sandbox; renewed at a third of it while the client lives.
        call_timeout_s: longest time of a call beside what a command itself may take. It covers
            waiting in the service's lines.
    """

    def __init__(
        self,
        config: ChannelConfig,
        *,
        owner: str = "",
        lease_s: float = 60.0,
        call_timeout_s: float = 60.0,
    ) -> None:
        self._config = config
        self._owner = owner
        self._lease_s = lease_s
        self._timeout_s = call_timeout_s
        self._channel: Channel | None = None
        self._connection: Connection | None = None
        self._sandboxes: dict[str, Sandbox] = {}
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._channel = open_channel(self._config, idempotent=_IDEMPOTENT)
        stub = SandboxServiceStub(self._channel)
        self._connection = Connection(stub, self._timeout_s, self._lease_s)
        self._renewing = asyncio.create_task(self._renew_forever())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def _connected(self) -> Connection:
        if self._connection is None:
            raise RuntimeError(
                "use SandboxClient as a context manager: async with SandboxClient(...)"
            )
        return self._connection

    async def close(self) -> None:
        """Destroys the sandboxes that are still there and closes the connection."""
        if self._channel is None:
            return
        try:
            results = await asyncio.gather(
                *(sandbox.destroy() for sandbox in self._sandboxes.values() if not sandbox.gone),
                *(self.destroy_snapshot(s) for s in list(self._connected.snapshot_ids)),
                return_exceptions=True,
            )
            for result in results:
                if isinstance(result, Exception):
                    # Its lease ends it: nothing is lost but time.
                    logger.warning("a sandbox or snapshot could not be destroyed: %s", result)
        finally:
            assert self._renewing is not None
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
            await self._channel.close()
            self._channel = self._connection = None

    # -- environments

    async def missing_environments(self, digests: Sequence[str]) -> list[str]:
        """Which of these environments the service does not hold."""
        with typed_errors():
            response = await self._connected.stub.MissingEnvironments(
                pb.MissingEnvironmentsRequest(digests=digests), timeout=self._timeout_s
            )
        return list(response.digests)

    async def put_environment(self, tree: EnvironmentTree) -> bool:
        """Stores a tree; False if the service had it already."""
        if not await self.missing_environments([tree.digest]):
            return False
        return await self.put_environment_tar(tree.digest, tree.tar_bytes())

    async def put_environment_tar(self, digest: str, archive: bytes) -> bool:
        """Stores a tree that is packed already, under its digest."""

        async def requests() -> AsyncIterator[pb.PutEnvironmentRequest]:
            yield pb.PutEnvironmentRequest(digest=digest)
            for chunk in wire.chunks(archive):
                yield pb.PutEnvironmentRequest(tar_chunk=chunk)

        with typed_errors():
            response = await self._connected.stub.PutEnvironment(
                requests(), timeout=self._timeout_s
            )
        return bool(response.stored)

    async def prefetch_images(self, images: Sequence[str]) -> list[ImageStatus]:
        """Has images pulled ahead of sandboxes; tells at once how far each is. Ask again to wait.

        Raises:
            WrongRequest: the service's back-end has no images.
        """
        with typed_errors():
            response = await self._connected.stub.PrefetchImages(
                pb.PrefetchImagesRequest(images=images), timeout=self._timeout_s
            )
        return [wire.image_from_proto(image) for image in response.images]

    # -- sandboxes

    async def create(
        self,
        environment: EnvironmentRef | EnvironmentTree | str = "",
        *,
        snapshot: Snapshot | str = "",
        key: str = "",
        limits: SandboxLimits | None = None,
        labels: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Sandbox:
        """Makes a sandbox and keeps its lease alive until it is destroyed or the client closes.

        Args:
            environment: a tree (put first if the service lacks it), a tree's digest, or a
                reference.
            snapshot: instead of an environment, what `Sandbox.snapshot` has kept, or its id.
            key: idempotency key: the same key gives the same sandbox. Default: a new one.
            limits: what it may use; default: the service's.
            labels: for listings.
            timeout_s: how long to wait; a service that is full is asked again until then.

        Raises:
            EnvironmentUnknown: put the environment, or make the snapshot, then create again.
            QuotaExhausted: the service was full until the end of `timeout_s`.
        """
        tree = environment if isinstance(environment, EnvironmentTree) else None
        if tree is not None:
            environment = tree.digest
        if snapshot:
            if environment:
                raise WrongRequest("create from an environment or from a snapshot, not from both")
            environment = EnvironmentRef(
                snapshot=snapshot if isinstance(snapshot, str) else snapshot.id
            )
        if isinstance(environment, str):
            environment = EnvironmentRef(tree_digest=environment)
        assert isinstance(environment, EnvironmentRef)
        given, bounds = wire.spec_to_proto(SandboxSpec(environment, limits or SandboxLimits()))
        request = pb.CreateSandboxRequest(
            idempotency_key=key or uuid.uuid4().hex,
            owner=self._owner,
            environment=given,
            limits=bounds,
            lease_s=self._lease_s,
            labels=labels or {},
        )
        deadline = Deadline.after(timeout_s or self._timeout_s)
        try:
            response = await self._create(request, deadline)
        except EnvironmentUnknown:
            if tree is None:
                raise
            await self.put_environment(tree)
            response = await self._create(request, deadline)
        sandbox = Sandbox(self._connected, response.sandbox_id, response.workdir)
        self._sandboxes[sandbox.id] = sandbox
        return sandbox

    async def _create(self, request: pb.CreateSandboxRequest, deadline: Deadline) -> Any:
        refused: QuotaExhausted | None = None
        while True:
            try:
                with typed_errors():
                    return await self._connected.stub.CreateSandbox(
                        request, timeout=deadline.remaining_s()
                    )
            except DeadlineExceeded:
                if refused is not None:
                    raise refused from None  # that is why there was no time left
                raise
            except QuotaExhausted as error:
                refused = error
                # Spread out, so that those who wait do not all come back at the same moment.
                wait_s = (error.retry_after_s or 1.0) * random.uniform(1.0, 1.5)  # noqa: S311
                if wait_s >= deadline.remaining_s():
                    raise
                await asyncio.sleep(wait_s)

    def attach(self, sandbox_id: str, workdir: str = "/workspace") -> Sandbox:
        """A handle for a sandbox of another client, which also has to renew its lease."""
        return Sandbox(self._connected, sandbox_id, workdir)

    async def list(self) -> list[SandboxInfo]:
        """The owner's living sandboxes; all of them for the empty owner."""
        with typed_errors():
            response = await self._connected.stub.ListSandboxes(
                pb.ListSandboxesRequest(owner=self._owner), timeout=self._timeout_s
            )
        return [wire.info_from_proto(info) for info in response.sandboxes]

    async def destroy(self, sandbox_id: str) -> bool:
        """Ends a sandbox; False if it was gone already."""
        self._sandboxes.pop(sandbox_id, None)
        return await self._connected.destroy(sandbox_id)

    async def destroy_snapshot(self, snapshot_id: str) -> bool:
        """Ends a snapshot's lease; False if there was none."""
        return await self._connected.destroy_snapshot(snapshot_id)

    async def status(self) -> ServiceStatus:
        """The service's limits, gauges and missing protections."""
        with typed_errors():
            response = await self._connected.stub.GetStatus(
                pb.GetStatusRequest(), timeout=self._timeout_s
            )
        return wire.status_from_proto(response)

    # -- leases

    async def _renew_forever(self) -> None:
        interval_s = self._lease_s / 3
        while True:
            await asyncio.sleep(interval_s)
            self._sandboxes = {s.id: s for s in self._sandboxes.values() if not s.gone}
            ids, kept = list(self._sandboxes), self._connected.snapshot_ids
            if not ids and not kept:
                continue
            began = time.monotonic()
            try:
                with typed_errors():
                    response = await self._connected.stub.RenewLeases(
                        pb.RenewLeasesRequest(
                            sandbox_ids=ids, snapshot_ids=kept, lease_s=self._lease_s
                        ),
                        timeout=interval_s,
                    )
            except ServiceError as error:
                # The leases outlast two more tries.
                logger.warning(
                    "leases could not be renewed (%.1f s): %s", time.monotonic() - began, error
                )
                continue
            kept.difference_update(response.gone)
            for sandbox_id in response.gone:
                sandbox = self._sandboxes.pop(sandbox_id, None)
                if sandbox is not None:
                    sandbox.gone = True
