"""A RolloutService over a function that plays groups: the contract without engines or sandboxes.

Its ledger outlives the server, as an engine's disk outlives its process.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from rollout_engine import wire
from rollout_engine.types import Assignment, FinishedGroup, GroupKey
from tailrace.rollout.v1 import rollout_service_pb2 as pb
from tailrace.rollout.v1 import rollout_service_pb2_grpc as pb_grpc

Play = Callable[[Assignment], FinishedGroup]


@dataclass(slots=True)
class _Row:
    """A group in the ledger."""

    assignment: Assignment
    cursor: int = 0
    group: FinishedGroup | None = None
    received: bool = False
    decision: pb.Decision.ValueType = pb.DECISION_UNSPECIFIED

    @property
    def state(self) -> pb.GroupState.ValueType:
        if self.decision:
            return pb.GROUP_STATE_COMMITTED
        if self.received:
            return pb.GROUP_STATE_RECEIVED
        return pb.GROUP_STATE_RUNNING if self.group is None else pb.GROUP_STATE_FINISHED


@dataclass(slots=True)
class FakeLedger:
    """What the service keeps over restarts.

    Attributes:
        rows: Every group it was assigned.
        deliveries: How often each group was sent.
        incarnation: Highest seen.
    """

    rows: dict[GroupKey, _Row] = field(default_factory=dict)
    deliveries: Counter[GroupKey] = field(default_factory=Counter)
    incarnation: int = 0
    cursor: int = 0

    def decisions(self) -> dict[str, int]:
        """Count the groups by the decision that was committed."""
        names = Counter(pb.Decision.Name(row.decision) for row in self.rows.values())
        return {name.removeprefix("DECISION_"): count for name, count in names.items()}


class FakeRolloutService(pb_grpc.RolloutServiceServicer):
    """One engine for one consumer at a time.

    Args:
        play: Plays a group; called in a thread.
        ledger: Given again to a service that replaces this one.
        credits_: How many groups may be assigned and not received.
    """

    def __init__(self, play: Play, ledger: FakeLedger | None = None, *, credits_: int = 64) -> None:
        self._play = play
        self.ledger = ledger or FakeLedger()
        self._credits = credits_

    async def RunGroups(  # noqa: N802
        self,
        request_iterator: AsyncIterator[pb.RunGroupsRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[pb.RunGroupsResponse]:
        """Run groups and keep them until they are committed."""
        outbox: asyncio.Queue[pb.RunGroupsResponse | None] = asyncio.Queue()
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read(request_iterator, outbox, tasks))
            while (response := await outbox.get()) is not None:
                yield response
            reading.cancel()

    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetStatusResponse:
        """Say how many groups the ledger holds."""
        return pb.GetStatusResponse(engine_id="fake", groups={"known": len(self.ledger.rows)})

    async def _read(
        self,
        requests: AsyncIterator[pb.RunGroupsRequest],
        outbox: asyncio.Queue[pb.RunGroupsResponse | None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        async for request in requests:
            match request.WhichOneof("message"):
                case "hello":
                    self._hello(request.hello, outbox, tasks)
                case "assign":
                    self._assign(wire.assignment_from_proto(request.assign), outbox, tasks)
                case "receipt":
                    for row in self.ledger.rows.values():
                        row.received |= 0 < row.cursor <= request.receipt.cursor
                case "commit":
                    self._commit(request.commit, outbox)
                case "withdraw":
                    key = GroupKey(request.withdraw.group_id, request.withdraw.assignment_epoch)
                    self.ledger.rows.pop(key, None)
                case _:
                    outbox.put_nowait(pb.RunGroupsResponse(heartbeat=pb.Heartbeat()))
        outbox.put_nowait(None)

    def _hello(
        self,
        hello: pb.Hello,
        outbox: asyncio.Queue[pb.RunGroupsResponse | None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.ledger.incarnation = max(self.ledger.incarnation, hello.incarnation)
        known = [
            pb.KnownGroup(
                group_id=key.group_id,
                assignment_epoch=key.epoch,
                state=row.state,
                cursor=row.cursor,
            )
            for key, row in self.ledger.rows.items()
        ]
        welcome = pb.Welcome(engine_id="fake", groups=known, credits=self._credits)
        outbox.put_nowait(pb.RunGroupsResponse(welcome=welcome))
        for row in self.ledger.rows.values():
            if not row.received and not row.decision:
                tasks.create_task(self._run(row, outbox))

    def _assign(
        self,
        assignment: Assignment,
        outbox: asyncio.Queue[pb.RunGroupsResponse | None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        key = assignment.key
        row = self.ledger.rows.get(key)
        if row is not None and row.decision:
            rejected = pb.Rejected(
                group_id=key.group_id,
                assignment_epoch=key.epoch,
                reason="ALREADY_EXISTS",
                message="the group is committed",
            )
            outbox.put_nowait(pb.RunGroupsResponse(rejected=rejected))
            return
        again = row is not None and row.received
        if row is None:
            row = self.ledger.rows[key] = _Row(assignment)
            tasks.create_task(self._run(row, outbox))
        elif again:
            row.received = False
            tasks.create_task(self._run(row, outbox))
        accepted = pb.Accepted(group_id=key.group_id, assignment_epoch=key.epoch)
        outbox.put_nowait(pb.RunGroupsResponse(accepted=accepted))

    def _commit(
        self, commit: pb.Commit, outbox: asyncio.Queue[pb.RunGroupsResponse | None]
    ) -> None:
        key = GroupKey(commit.group_id, commit.assignment_epoch)
        row = self.ledger.rows.get(key)
        if row is not None:
            row.decision = commit.decision
        committed = pb.Committed(group_id=key.group_id, assignment_epoch=key.epoch)
        outbox.put_nowait(pb.RunGroupsResponse(committed=committed))

    async def _run(self, row: _Row, outbox: asyncio.Queue[pb.RunGroupsResponse | None]) -> None:
        if row.group is None:
            row.group = await asyncio.to_thread(self._play, row.assignment)
        # Every delivery has a cursor of its own; they rise.
        self.ledger.cursor += 1
        row.cursor = self.ledger.cursor
        key = row.assignment.key
        self.ledger.deliveries[key] += 1
        for index, attempt in enumerate(row.group.attempts):
            data = wire.attempt_to_bytes(attempt)
            for chunk in wire.attempt_chunks(key, index, data, wire.checksum(data)):
                outbox.put_nowait(pb.RunGroupsResponse(attempt_chunk=chunk))
        finished = pb.GroupFinished(
            group_id=key.group_id,
            assignment_epoch=key.epoch,
            task_id=row.group.task_id,
            cursor=row.cursor,
            attempts=len(row.group.attempts),
        )
        outbox.put_nowait(pb.RunGroupsResponse(group_finished=finished))
