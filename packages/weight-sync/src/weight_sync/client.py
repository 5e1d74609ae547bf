"""A typed client of the WeightService, for publishers, receivers and tools."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import grpc
from service_kit.streams import with_idle_deadline
from tailrace.weight_sync.v1 import weight_service_pb2 as pb
from tailrace.weight_sync.v1 import weight_service_pb2_grpc as pb_grpc

from weight_sync import wire
from weight_sync.types import (
    AnnouncedVersion,
    EngineEndpoint,
    EngineReport,
    Grant,
    Needed,
    Nodes,
    Versions,
)


@dataclass(frozen=True, slots=True)
class Awaited:
    """How far the engines were when `await_version` returned."""

    engines: int
    oldest_version: int


class WeightClient:
    """Calls over a channel of `service_kit.channel.open_channel`; raises `ServiceError`.

    Open the channel with `contracts=[weight_service_pb2.DESCRIPTOR]`: what may be repeated then is,
    while the service restarts.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = pb_grpc.WeightServiceStub(channel)

    async def acquire_publisher(
        self, run: str, *, holder: str, known_number: int, timeout_s: float
    ) -> Grant:
        """Take over publishing for a run."""
        response = await self._stub.AcquirePublisher(
            pb.AcquirePublisherRequest(run=run, holder=holder, known_number=known_number),
            timeout=timeout_s,
        )
        return Grant(response.incarnation, response.last_number, response.store_uri)

    async def plan_version(self, run: str, *, timeout_s: float) -> Sequence[str]:
        """Return the hosts that the next version helps only if it goes out whole."""
        response = await self._stub.PlanVersion(pb.PlanVersionRequest(run=run), timeout=timeout_s)
        return tuple(response.stuck_hosts)

    async def announce(self, announced: AnnouncedVersion, *, timeout_s: float) -> Needed:
        """Make a committed version known, and learn which versions must stay."""
        response = await self._stub.Announce(
            pb.AnnounceRequest(version=wire.announced_to_proto(announced)), timeout=timeout_s
        )
        return Needed(
            tuple(response.held_numbers), tuple(response.target_numbers), response.settled
        )

    async def list_versions(self, run: str = "", *, timeout_s: float) -> Versions:
        """List a run's newest versions, oldest first; empty: the run acquired last."""
        response = await self._stub.ListVersions(pb.ListVersionsRequest(run=run), timeout=timeout_s)
        return Versions(
            [wire.announced_from_proto(version) for version in response.versions],
            response.incarnation,
        )

    async def watch_versions(
        self, run: str = "", *, after_number: int = 0, idle_timeout_s: float
    ) -> AsyncGenerator[AnnouncedVersion, None]:
        """Yield the newest version, then each that follows.

        Args:
            run: empty: whichever run was acquired last.
            after_number: above 0: yield every version after it, from the oldest on.
            idle_timeout_s: longest silence, heartbeats included.

        Raises:
            DeadlineExceeded: nothing came for `idle_timeout_s`; open another stream.
        """
        call = self._stub.WatchVersions(pb.WatchVersionsRequest(run=run, after_number=after_number))
        async for response in with_idle_deadline(call, idle_timeout_s, "WatchVersions"):
            if response.WhichOneof("event") == "version":
                yield wire.announced_from_proto(response.version)

    async def register_node(
        self,
        *,
        node_id: str,
        host: str,
        rollout_target: str,
        engines: Sequence[EngineEndpoint],
        lease_s: float,
        timeout_s: float,
    ) -> float:
        """Announce a node's engines, or renew their lease; return the seconds granted."""
        response = await self._stub.RegisterNode(
            pb.RegisterNodeRequest(
                node_id=node_id,
                host=host,
                rollout_target=rollout_target,
                engines=[wire.endpoint_to_proto(engine) for engine in engines],
                lease_s=lease_s,
            ),
            timeout=timeout_s,
        )
        return float(response.lease_s)

    async def report_engines(
        self,
        host: str,
        engines: Sequence[EngineReport],
        *,
        file_target: str = "",
        copy_numbers: Sequence[int] = (),
        stuck_at: int = 0,
        timeout_s: float,
    ) -> None:
        """Report on every engine of a host, on copies to hand out, and where it is stuck."""
        await self._stub.ReportEngines(
            pb.ReportEnginesRequest(
                host=host,
                engines=[wire.report_to_proto(engine) for engine in engines],
                file_target=file_target,
                copy_numbers=copy_numbers,
                stuck_at=stuck_at,
            ),
            timeout=timeout_s,
        )

    async def list_nodes(self, *, timeout_s: float) -> Nodes:
        """List the live nodes and their engines."""
        response = await self._stub.ListNodes(pb.ListNodesRequest(), timeout=timeout_s)
        return wire.nodes_from_proto(response)

    async def await_version(self, number: int, *, engines: int = 0, timeout_s: float) -> Awaited:
        """Wait until so many engines (0: all, and at least one) hold a version this new.

        Returns at the deadline too: compare the count.
        """
        response = await self._stub.AwaitVersion(
            pb.AwaitVersionRequest(number=number, engines=engines), timeout=timeout_s
        )
        return Awaited(response.engines, response.oldest_version)
