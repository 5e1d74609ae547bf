"""The WeightService: translate, decide, record, translate back."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, TypeVar

import grpc
from service_kit.deadlines import remaining_s
from service_kit.errors import Reason, service_error
from tailrace.weight_sync.v1 import weight_service_pb2 as pb
from tailrace.weight_sync.v1 import weight_service_pb2_grpc as pb_grpc

from weight_sync import errors, wire
from weight_sync.core.manifest import Manifest, check_run
from weight_sync.core.plan import Link, stuck
from weight_sync.core.registry import Arrivals, NodeView, Registry
from weight_sync.failures import service_failure
from weight_sync.state import VersionLog
from weight_sync.telemetry import Instruments
from weight_sync.types import AnnouncedVersion

SERVICE_NAME = "tailrace.weight_sync.v1.WeightService"

# Kept back from a caller's deadline, so that "not yet" arrives as an answer and not as an error.
_ANSWER_S = 0.1
_LONGEST_AWAIT_S = 600.0
T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]


class WeightServicer(pb_grpc.WeightServiceServicer):
    """Serves one record of versions and one registry of engines."""

    def __init__(
        self,
        log: VersionLog,
        registry: Registry,
        *,
        store_uri: str,
        read_manifest: Callable[[str], Manifest] | None,
        heartbeat_s: float = 5.0,
        listed_versions: int = 1000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve `log` and `registry`.

        Args:
            log: the durable record.
            registry: leases and reports; `clock` must be the one it was started by.
            store_uri: told to publishers.
            read_manifest: reads a manifest by URI, to check announcements; None: do not.
            heartbeat_s: longest silence on a stream of versions.
            listed_versions: so many of the newest are listed.
            clock: monotonic seconds.
        """
        self._log = log
        self._registry = registry
        self._store_uri = store_uri
        self._read_manifest = read_manifest
        self._heartbeat_s = heartbeat_s
        self._listed_versions = listed_versions
        self._clock = clock
        self._arrivals = Arrivals()
        self._instruments = Instruments()
        self._versions_changed = asyncio.Event()
        self._engines_changed = asyncio.Event()
        self._draining = asyncio.Event()

    async def drain(self) -> None:
        """End the streams and the waiting calls, for `Service.on_drain`."""
        self._draining.set()
        self._wake_versions()
        self._wake_engines()

    async def AcquirePublisher(  # noqa: N802
        self, request: pb.AcquirePublisherRequest, context: Context
    ) -> pb.AcquirePublisherResponse:
        """Give publishing to a new incarnation."""
        run = _checked(lambda: check_run(request.run))
        record = await self._recorded(
            lambda: self._log.acquire(run, holder=request.holder, known_number=request.known_number)
        )
        return pb.AcquirePublisherResponse(
            incarnation=record.incarnation,
            last_number=record.last_number,
            store_uri=self._store_uri,
        )

    async def PlanVersion(  # noqa: N802
        self, request: pb.PlanVersionRequest, context: Context
    ) -> pb.PlanVersionResponse:
        """Say whom a delta would not help."""
        links = [Link(v.version.number, v.base) for v in self._log.versions(request.run)]
        hosts = stuck(links, self._registry.stuck_at(now_s=self._clock()))
        return pb.PlanVersionResponse(stuck_hosts=hosts)

    async def Announce(  # noqa: N802
        self, request: pb.AnnounceRequest, context: Context
    ) -> pb.AnnounceResponse:
        """Record a version and tell the receivers."""
        announced = _checked(lambda: wire.announced_from_proto(request.version))
        if await self._recorded(lambda: self._announce(announced)):
            self._arrivals.announced(announced.version.number, now_s=self._clock())
        needed = self._registry.needed(now_s=self._clock())
        return pb.AnnounceResponse(
            held_numbers=needed.held, target_numbers=needed.targets, settled=needed.settled
        )

    async def ListVersions(  # noqa: N802
        self, request: pb.ListVersionsRequest, context: Context
    ) -> pb.ListVersionsResponse:
        """List a run's newest versions, oldest first; an empty run is the one acquired last."""
        run = request.run or self._log.current_run
        versions = self._log.versions(run)[-self._listed_versions :]
        return pb.ListVersionsResponse(
            versions=[wire.announced_to_proto(version) for version in versions],
            incarnation=self._log.record(run).incarnation,
        )

    async def WatchVersions(  # noqa: N802
        self, request: pb.WatchVersionsRequest, context: Context
    ) -> AsyncIterator[pb.WatchVersionsResponse]:
        """Stream versions: the newest now (or all after a cursor), then each as it comes."""
        after = request.after_number
        while not self._draining.is_set():
            changed = self._versions_changed
            run = request.run or self._log.current_run
            fresh = self._log.versions(run, after_number=after)
            for announced in fresh if after else fresh[-1:]:
                after = announced.version.number
                yield pb.WatchVersionsResponse(version=wire.announced_to_proto(announced))
            if not await _happened(changed, self._heartbeat_s):
                yield pb.WatchVersionsResponse(heartbeat=pb.Heartbeat())

    async def RegisterNode(  # noqa: N802
        self, request: pb.RegisterNodeRequest, context: Context
    ) -> pb.RegisterNodeResponse:
        """Take in a node or renew its lease."""
        if not request.node_id or not request.host:
            raise service_error(
                Reason.INVALID_ARGUMENT,
                f"expected node_id and host, found {request.node_id!r} and {request.host!r}; "
                "engines with the same host share one receiver, so name the machine",
            )
        granted_s = self._registry.register(
            node_id=request.node_id,
            host=request.host,
            rollout_target=request.rollout_target,
            engines=[wire.endpoint_from_proto(engine) for engine in request.engines],
            lease_s=request.lease_s,
            now_s=self._clock(),
        )
        self._wake_engines()
        return pb.RegisterNodeResponse(lease_s=granted_s)

    async def ReportEngines(  # noqa: N802
        self, request: pb.ReportEnginesRequest, context: Context
    ) -> pb.ReportEnginesResponse:
        """Take a receiver's word on its engines."""
        self._registry.report(
            request.host,
            [wire.report_from_proto(engine) for engine in request.engines],
            now_s=self._clock(),
            file_target=request.file_target,
            copy_numbers=request.copy_numbers,
            stuck_at=request.stuck_at,
        )
        now_s = self._clock()
        oldest = self._registry.serving(0, now_s=now_s).oldest_version
        for took_s in self._arrivals.held(oldest, now_s=now_s):
            self._instruments.last_receiver_s.record(took_s)
        self._wake_engines()
        return pb.ReportEnginesResponse()

    async def ListNodes(  # noqa: N802
        self, request: pb.ListNodesRequest, context: Context
    ) -> pb.ListNodesResponse:
        """List the live nodes and how far their engines are."""
        run = self._log.current_run
        newest = self._log.newest(run)
        return pb.ListNodesResponse(
            nodes=[
                wire.node_to_proto(self._with_lag(node, run))
                for node in self._registry.nodes(now_s=self._clock())
            ],
            newest_version=newest.version.number if newest else 0,
        )

    async def AwaitVersion(  # noqa: N802
        self, request: pb.AwaitVersionRequest, context: Context
    ) -> pb.AwaitVersionResponse:
        """Wait until enough engines hold a version, and say how many do when time is up."""
        left_s = remaining_s(context, default_s=_LONGEST_AWAIT_S)
        ends_s = time.monotonic() + min(left_s, _LONGEST_AWAIT_S) - _ANSWER_S
        while True:
            changed = self._engines_changed
            serving = self._registry.serving(request.number, now_s=self._clock())
            # At least one: "every engine" must not be true of an empty registry.
            wanted = request.engines or max(serving.registered, 1)
            wait_s = ends_s - time.monotonic()
            if serving.engines >= wanted or wait_s <= 0 or self._draining.is_set():
                return pb.AwaitVersionResponse(
                    engines=serving.engines, oldest_version=serving.oldest_version
                )
            # Leases end without an event, hence the second.
            await _happened(changed, min(wait_s, 1.0))

    def _announce(self, announced: AnnouncedVersion) -> bool:
        # First: what a fenced publisher wrote may have been deleted, and fenced it must hear.
        self._log.check(announced)
        if self._read_manifest is not None:
            manifest = self._read_manifest(announced.manifest_uri)
            said = (announced.version, announced.base, announced.payload_bytes)
            found = (manifest.version, manifest.base, manifest.payload_bytes)
            if said != found:
                raise errors.ManifestError(
                    f"{announced.manifest_uri} holds {found}, the announcement says {said}; "
                    "announce what was committed"
                )
        return self._log.announce(announced)

    async def _recorded(self, change: Callable[[], T]) -> T:
        # Shielded: what a caller began and gave up is recorded all the same, and told.
        recording = asyncio.ensure_future(asyncio.to_thread(_checked, change))
        recording.add_done_callback(lambda _: self._wake_versions())
        return await asyncio.shield(recording)

    def _with_lag(self, node: NodeView, run: str) -> NodeView:
        return replace(
            node,
            engines=tuple(
                replace(engine, versions_behind=self._log.behind(run, engine.version))
                for engine in node.engines
            ),
        )

    def _wake_versions(self) -> None:
        self._versions_changed.set()
        self._versions_changed = asyncio.Event()

    def _wake_engines(self) -> None:
        self._engines_changed.set()
        self._engines_changed = asyncio.Event()


async def _happened(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _checked(work: Callable[[], T]) -> T:
    """Do it, and put errors of this package into the words of the contract."""
    try:
        return work()
    except errors.WeightSyncError as error:
        raise service_failure(error) from error
    except ValueError as error:
        raise service_error(Reason.INVALID_ARGUMENT, str(error)) from error
