"""The node is announced, renewed, and announced again to a service that comes back."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from rollout_engine.registration import Endpoint, Node, keep_registered
from service_kit.channel import ChannelConfig, open_channel
from service_kit.errors import Unavailable
from service_kit.server import Server, ServerConfig, Service
from tailrace.weight_sync.v1 import weight_service_pb2 as pb
from tailrace.weight_sync.v1 import weight_service_pb2_grpc as pb_grpc

# The stubs declare every method abstract; at run time those left out are UNIMPLEMENTED.
Base: Any = pb_grpc.WeightServiceServicer
NODE = Node("n-1", "host-a", "127.0.0.1:7104", [Endpoint("http://127.0.0.1:7201", "embedded")], 9.0)


class FakeWeights(Base):  # type: ignore[misc]
    def __init__(self) -> None:
        self.requests: list[pb.RegisterNodeRequest] = []
        self.failures = 0

    async def RegisterNode(self, request: pb.RegisterNodeRequest, context: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise Unavailable("restarting", retry_after_s=60)
        self.requests.append(request)
        return pb.RegisterNodeResponse(lease_s=request.lease_s)


async def test_a_node_renews_within_its_lease_and_outlasts_a_service_that_is_down() -> None:
    fake = FakeWeights()
    sleeps: list[float] = []
    enough = asyncio.Event()

    async def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(fake.requests) == 2 and len(sleeps) < 3:
            fake.failures = 2
        if len(fake.requests) == 4:
            enough.set()
            await asyncio.Event().wait()

    register = partial(pb_grpc.add_WeightServiceServicer_to_server, fake)
    service = Service("tailrace.weight_sync.v1.WeightService", register)
    async with (
        Server(ServerConfig(drain_grace_s=0.5), [service]) as server,
        open_channel(ChannelConfig(target=server.address)) as channel,
    ):
        keeping = asyncio.create_task(keep_registered(channel, NODE, sleep=sleep))
        await asyncio.wait_for(enough.wait(), 20)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    first = fake.requests[0]
    assert (first.node_id, first.host, first.rollout_target) == ("n-1", "host-a", "127.0.0.1:7104")
    assert [(e.url, e.kind) for e in first.engines] == [("http://127.0.0.1:7201", "embedded")]
    assert [s for s in sleeps if s == 3.0] == [3.0] * 4
    assert len([s for s in sleeps if s < 1.0]) == 2
