"""The services a run talks to: where versions are announced, tasks listed, groups run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Protocol

from service_kit.channel import Channel, ChannelConfig, open_channel
from service_kit.errors import InvalidArgument, NotFound
from tailrace.eval.v1 import eval_service_pb2 as eval_pb
from tailrace.eval.v1 import eval_service_pb2_grpc as eval_grpc
from tailrace.rollout.v1 import rollout_service_pb2 as rollout_pb
from tailrace.weight_sync.v1 import weight_service_pb2 as weights_pb

from grpo_trainer.config import TrainerConfig
from grpo_trainer.rollouts import GroupSource, RolloutPool
from grpo_trainer.weights import WeightsPublisher, WeightSyncPublisher

PAGE_TASKS = 1000


class Peers(Protocol):
    """What a run needs of the other services."""

    async def acquire_publisher(self, *, known_number: int) -> WeightsPublisher:
        """Take over publishing for the run."""
        ...

    async def list_tasks(self, task_set: str, *, limit: int) -> tuple[str, ...]:
        """List the ids of a task set, the first `limit` of them, or all for 0."""
        ...

    def group_source(
        self, consumer_id: str, *, incarnation: int, cursors: Mapping[str, int]
    ) -> GroupSource:
        """Make the source of a stage's groups; it connects when run."""
        ...


class GrpcPeers:
    """The services named in the configuration; channels are opened when first needed.

    Use as an async context manager; it closes the channels.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._channels: dict[str, Channel] = {}
        self._closing = AsyncExitStack()

    async def __aenter__(self) -> GrpcPeers:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._closing.aclose()

    async def acquire_publisher(self, *, known_number: int) -> WeightsPublisher:
        """Take over publishing for the run."""
        return await WeightSyncPublisher.acquire(
            self._channel(self._config.weights),
            run=self._config.run,
            known_number=known_number,
            config=self._config.publish,
            acquire_timeout_s=self._config.call_timeout_s,
            publish_timeout_s=self._config.publish_timeout_s,
        )

    async def list_tasks(self, task_set: str, *, limit: int) -> tuple[str, ...]:
        """List the ids of a task set, the first `limit` of them, or all for 0.

        Raises:
            ServiceError: The evaluator does not know the set, or cannot be reached.
        """
        stub = eval_grpc.EvalServiceStub(self._channel(self._config.evaluator))
        found: list[str] = []
        token = ""
        while not limit or len(found) < limit:
            size = min(PAGE_TASKS, limit - len(found)) if limit else PAGE_TASKS
            request = eval_pb.ListTasksRequest(task_set=task_set, page_size=size, page_token=token)
            # Each page has its own deadline: a generated set is made while it is listed.
            page = await stub.ListTasks(request, timeout=self._config.call_timeout_s)
            found.extend(task.task_id for task in page.tasks)
            token = page.next_page_token
            if not token:
                break
        if not found:
            raise NotFound(f"task set {task_set!r} has no tasks; the evaluator lists its sets")
        return tuple(found)

    def group_source(
        self, consumer_id: str, *, incarnation: int, cursors: Mapping[str, int]
    ) -> GroupSource:
        """Make the source of a stage's groups; it connects when run."""
        if not self._config.engines:
            raise InvalidArgument("no rollout engine is configured; set engines")
        named = zip(self._config.engine_names, self._config.engines, strict=True)
        channels = {name: self._channel(engine.channel) for name, engine in named}
        return RolloutPool(
            channels, consumer_id=consumer_id, incarnation=incarnation, cursors=cursors
        )

    def _channel(self, config: ChannelConfig) -> Channel:
        channel = self._channels.get(config.target)
        if channel is None:
            channel = self._channels[config.target] = open_channel(
                config,
                contracts=(weights_pb.DESCRIPTOR, eval_pb.DESCRIPTOR, rollout_pb.DESCRIPTOR),
            )
            self._closing.push_async_callback(channel.close)
        return channel
