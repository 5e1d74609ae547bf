"""One consumer's open stream: reads what it asks, delivers what has finished, tells the figures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from service_kit.errors import (
    InvalidArgument,
    Reason,
    ServiceError,
    Unavailable,
    service_error,
)
from tailrace.rollout.v1 import rollout_service_pb2 as pb

from rollout_engine import wire
from rollout_engine.errors import LedgerDiskFullError
from rollout_engine.ledger.rows import Delivery, GroupRef, ResumedGroup
from rollout_engine.ledger.store import Ledger
from rollout_engine.supervisor import Supervisor
from rollout_engine.types import Assignment, GroupKey
from rollout_engine.wire_enums import DECISIONS, GROUP_STATES, PURPOSES

logger = logging.getLogger(__name__)

Send = Callable[[pb.RunGroupsResponse], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What holds for every consumer's stream.

    Attributes:
        credits: Groups that a consumer may have assigned and not received.
        max_attempts: Largest group.
    """

    credits: int
    max_attempts: int
    heartbeat_s: float
    progress_s: float
    chunk_bytes: int


class Session:
    """A consumer between its Hello and the end of its stream.

    Args:
        engine_id: Told in the Welcome.
        hello: The stream's first message, checked.
        requests: The rest of the stream.
        send: Writes a message to the stream.

    """

    def __init__(
        self,
        *,
        engine_id: str,
        hello: pb.Hello,
        requests: AsyncIterator[pb.RunGroupsRequest],
        send: Send,
        ledger: Ledger,
        supervisor: Supervisor,
        settings: SessionSettings,
        is_draining: Callable[[], bool],
    ) -> None:
        self.consumer_id = hello.consumer_id
        self.incarnation = hello.incarnation
        self._engine_id = engine_id
        self._hello = hello
        self._requests = requests
        self._raw_send = send
        self._sending = asyncio.Lock()
        self._ledger = ledger
        self._supervisor = supervisor
        self._settings = settings
        self._is_draining = is_draining
        self._end = asyncio.Event()
        self._end_error: ServiceError = Unavailable("the stream was closed")

    def end(self, error: ServiceError) -> None:
        """End the stream with an error."""
        if not self._end.is_set():
            self._end_error = error
            self._end.set()

    async def run(self) -> None:
        """Serve the stream until the consumer closes it.

        Raises:
            ServiceError: What the stream ends with; inside an exception group, perhaps.

        """
        hello = self._hello
        await self._supervisor.ready.wait()
        found = await self._ledger.hello(
            self.consumer_id,
            PURPOSES.from_proto(hello.purpose),
            hello.incarnation,
            hello.cursor,
        )
        known = [
            pb.KnownGroup(
                group_id=group.key.group_id,
                assignment_epoch=group.key.epoch,
                state=GROUP_STATES.to_proto(group.standing),
                cursor=group.cursor,
            )
            for group in found.groups
        ]
        await self._send(
            pb.RunGroupsResponse(
                welcome=pb.Welcome(
                    engine_id=self._engine_id,
                    groups=known,
                    credits=self._settings.credits,
                    newest_cursor=found.newest_cursor,
                )
            )
        )
        async with asyncio.TaskGroup() as tasks:
            others = [
                tasks.create_task(self._deliver(hello.cursor)),
                tasks.create_task(self._tell()),
                tasks.create_task(self._watch_end()),
            ]
            async for request in self._requests:
                await self._handle(request)
            for task in others:
                task.cancel()

    async def _watch_end(self) -> None:
        await self._end.wait()
        raise self._end_error

    async def _send(self, response: pb.RunGroupsResponse) -> None:
        # Several tasks write; a stream takes one message at a time.
        async with self._sending:
            await self._raw_send(response)

    async def _handle(self, request: pb.RunGroupsRequest) -> None:
        match request.WhichOneof("message"):
            case "assign":
                await self._assign(request.assign)
            case "receipt":
                await self._ledger.received(self.consumer_id, request.receipt.cursor)
            case "commit":
                await self._commit(request.commit)
            case "withdraw":
                withdraw = request.withdraw
                ref = self._ref(withdraw.group_id, withdraw.assignment_epoch)
                logger.info("group %s is withdrawn: %s", ref, withdraw.reason)
                await self._supervisor.undivided(self._give_up(ref))
            case "forget":
                keep = [GroupKey(k.group_id, k.assignment_epoch) for k in request.forget.keep]
                await self._supervisor.undivided(self._forget(keep))
            case "hello":
                raise InvalidArgument("Hello came twice on one stream; open another stream")
            case _:  # a heartbeat, or a newer consumer's message
                pass

    def _ref(self, group_id: str, epoch: int) -> GroupRef:
        return GroupRef(self.consumer_id, wire.group_key(group_id, epoch))

    async def _assign(self, message: pb.Assign) -> None:
        try:
            assignment = wire.assignment_from_proto(message)
            await self._accept(assignment)
        except (ServiceError, LedgerDiskFullError) as error:
            reason = error.reason if isinstance(error, ServiceError) else Reason.DISK_FULL
            rejected = pb.Rejected(
                group_id=message.group_id,
                assignment_epoch=message.assignment_epoch,
                reason=reason.value,
                message=str(error),
            )
            await self._send(pb.RunGroupsResponse(rejected=rejected))
            return
        accepted = pb.Accepted(group_id=message.group_id, assignment_epoch=message.assignment_epoch)
        await self._send(pb.RunGroupsResponse(accepted=accepted))

    async def _accept(self, assignment: Assignment) -> None:
        if self._is_draining():
            raise service_error(Reason.DRAINING, "the engine drains; assign the group elsewhere")
        if assignment.attempts > self._settings.max_attempts:
            raise InvalidArgument(
                f"group {assignment.key} asks for {assignment.attempts} attempts; this engine "
                f"makes at most {self._settings.max_attempts} (consumers.max_attempts)"
            )
        await self._supervisor.undivided(self._take_on(assignment))

    async def _take_on(self, assignment: Assignment) -> None:
        ref = GroupRef(self.consumer_id, assignment.key)
        acceptance = await self._ledger.accept(
            ref,
            task_id=assignment.task_id,
            attempts=assignment.attempts,
            assignment=wire.assignment_to_bytes(assignment),
            credits_=self._settings.credits,
        )
        for old in acceptance.superseded:
            await self._supervisor.cancel(old)
        if acceptance.new:
            self._supervisor.start(ref, assignment, acceptance.sequence)
        elif acceptance.redelivered:
            self._supervisor.finished(self.consumer_id).happened()

    async def _commit(self, commit: pb.Commit) -> None:
        ref = self._ref(commit.group_id, commit.assignment_epoch)
        await self._supervisor.undivided(self._settle(ref, commit))
        committed = pb.Committed(group_id=commit.group_id, assignment_epoch=commit.assignment_epoch)
        await self._send(pb.RunGroupsResponse(committed=committed))

    async def _settle(self, ref: GroupRef, commit: pb.Commit) -> None:
        await self._supervisor.cancel(ref)
        await self._ledger.commit(ref, DECISIONS.from_proto(commit.decision), commit.step)

    async def _forget(self, keep: Sequence[GroupKey]) -> None:
        for ref in await self._ledger.forget(self.consumer_id, keep):
            await self._supervisor.cancel(ref)

    async def _give_up(self, ref: GroupRef) -> None:
        # Cancelled first: a group that ends in between must not finish.
        await self._supervisor.cancel(ref)
        await self._ledger.withdraw(ref)

    async def _deliver(self, cursor: int) -> None:
        finished = self._supervisor.finished(self.consumer_id)
        while True:
            seen = finished.count
            found = await self._ledger.deliverable(self.consumer_id, cursor)
            if found is None:
                await finished.after(seen)
            elif isinstance(found, ResumedGroup):
                self._supervisor.resume(found)
            else:
                await self._send_group(found)
                cursor = found.cursor

    async def _send_group(self, group: Delivery) -> None:
        for attempt in group.attempts:
            for chunk in wire.attempt_chunks(
                group.key,
                attempt.index,
                attempt.payload,
                attempt.checksum,
                self._settings.chunk_bytes,
            ):
                await self._send(pb.RunGroupsResponse(attempt_chunk=chunk))
        finished = pb.GroupFinished(
            group_id=group.key.group_id,
            assignment_epoch=group.key.epoch,
            task_id=group.task_id,
            cursor=group.cursor,
            attempts=len(group.attempts),
            quarantined=None
            if group.quarantined is None
            else wire.fault_to_proto(group.quarantined),
            faulted_tries=[wire.faulted_try_to_proto(tried) for tried in group.faulted_tries],
        )
        await self._send(pb.RunGroupsResponse(group_finished=finished))

    async def _tell(self) -> None:
        """Send figures now and then, and heartbeats in between."""
        due_s = 0.0
        while True:
            if due_s <= 0.0:
                progress = wire.progress_to_proto(self._supervisor.progress(self.consumer_id))
                await self._send(pb.RunGroupsResponse(progress=progress))
                due_s = self._settings.progress_s
            else:
                await self._send(pb.RunGroupsResponse(heartbeat=pb.Heartbeat()))
            pause_s = min(self._settings.heartbeat_s, due_s)
            await asyncio.sleep(pause_s)
            due_s -= pause_s


class Sessions:
    """The open streams: at most one for each consumer, the latest."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self.draining = False

    @property
    def consumers(self) -> list[str]:
        """Consumers with an open stream."""
        return sorted(self._open)

    def enter(self, session: Session) -> None:
        """Take a session in; an older one of the same consumer ends.

        Raises:
            ServiceError: `FENCED` by a newer incarnation, or the engine drains.

        """
        if self.draining:
            raise service_error(Reason.DRAINING, "the engine drains; connect elsewhere or later")
        older = self._open.get(session.consumer_id)
        if older is not None:
            if older.incarnation > session.incarnation:
                raise service_error(
                    Reason.FENCED,
                    f"incarnation {older.incarnation} of {session.consumer_id!r} is connected",
                )
            older.end(_superseded(older, session))
        self._open[session.consumer_id] = session

    def leave(self, session: Session) -> None:
        """Let a session go."""
        if self._open.get(session.consumer_id) is session:
            del self._open[session.consumer_id]

    async def drain(self) -> None:
        """End every stream and take none in any more."""
        self.draining = True
        for session in self._open.values():
            session.end(service_error(Reason.DRAINING, "the engine drains; connect again later"))


def _superseded(older: Session, newer: Session) -> ServiceError:
    if older.incarnation < newer.incarnation:
        return service_error(
            Reason.FENCED,
            f"incarnation {newer.incarnation} of {older.consumer_id!r} has taken over from "
            f"{older.incarnation}; this one must stop",
        )
    return Unavailable(f"{older.consumer_id!r} has opened another stream")


__all__ = ["Session", "SessionSettings", "Sessions"]
