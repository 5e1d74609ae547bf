"""Announcing this node and its engines to the WeightService, again and again under a lease."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from service_kit.errors import ServiceError
from tailrace.weight_sync.v1 import weight_service_pb2 as pb
from tailrace.weight_sync.v1 import weight_service_pb2_grpc as pb_grpc

from rollout_engine.core.retry import Backoff

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An engine's base URL, and whether it is `embedded` or `sglang`."""

    url: str
    kind: str


@dataclass(frozen=True, slots=True)
class Node:
    """What is announced.

    Attributes:
        node_id: Stays the same over restarts.
        host: Engines with the same host share one receiver of weights.
        rollout_target: Where the trainer reaches this node's RolloutService.
        lease_s: A node that does not renew for so long is forgotten.
    """

    node_id: str
    host: str
    rollout_target: str
    engines: Sequence[Endpoint]
    lease_s: float


async def keep_registered(
    channel: grpc.aio.Channel,
    node: Node,
    *,
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    rng: random.Random | None = None,
) -> None:
    """Register the node and renew it, until cancelled.

    A WeightService that is down is waited for: it forgets its nodes when it restarts, and the next
    renewal tells it again.
    """
    stub = pb_grpc.WeightServiceStub(channel)
    request = pb.RegisterNodeRequest(
        node_id=node.node_id,
        host=node.host,
        rollout_target=node.rollout_target,
        engines=[pb.EngineEndpoint(url=e.url, kind=e.kind) for e in node.engines],
        lease_s=node.lease_s,
    )
    rng = rng or random.Random()  # noqa: S311 -- jitter
    interval_s = node.lease_s / 3
    backoff = Backoff(min(0.2, interval_s), 2.0, interval_s)
    failures = 0
    while True:
        try:
            await stub.RegisterNode(request, timeout=interval_s)
        except ServiceError as error:
            failures += 1
            if failures == 1:
                logger.warning("the node could not be registered: %s; trying on", error)
            await sleep(backoff.delay_s(failures, rng.random()))
        else:
            if failures:
                logger.info("the node is registered again")
            failures = 0
            await sleep(interval_s)


__all__ = ["Endpoint", "Node", "keep_registered"]
