"""A consumer's side of `RunGroups`: assign groups, take finished ones, commit decisions."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

import grpc
from service_kit.errors import Reason, ServiceError, Unavailable, service_error
from service_kit.streams import with_idle_deadline
from tailrace.rollout.v1 import rollout_service_pb2 as pb
from tailrace.rollout.v1 import rollout_service_pb2_grpc as pb_grpc

from rollout_engine import wire
from rollout_engine.assembly import GroupAssembly
from rollout_engine.consumer_config import ConsumerConfig
from rollout_engine.core.consumption import ConsumerBook, Standing
from rollout_engine.core.retry import Backoff
from rollout_engine.types import (
    Assignment,
    Decision,
    FinishedGroup,
    GroupKey,
    Progress,
    Purpose,
)
from rollout_engine.wire_enums import DECISIONS, PURPOSES

logger = logging.getLogger(__name__)

_FATAL = frozenset(
    {Reason.FENCED, Reason.INVALID_ARGUMENT, Reason.UNAUTHENTICATED, Reason.UNIMPLEMENTED}
)
_PUT_OFF = frozenset({Reason.QUOTA_EXHAUSTED, Reason.DRAINING, Reason.UNAVAILABLE})
_ALIVE = frozenset({pb.GROUP_STATE_RUNNING, pb.GROUP_STATE_FINISHED})


class GroupConsumer:
    """One consumer's stream to one RolloutService, kept open across disconnects and restarts.

    Args:
        channel: To the service. One made by `service_kit.channel.open_channel`.
        consumer_id: Names the consumer over all its lives.
        purpose: What the groups are for.
        incarnation: Of the consumer; an engine refuses a lower one than it has seen.
        cursor: Of the last group received in an earlier life; 0 for none. Uncommitted groups after
            it are delivered again.
        keep: Groups of an earlier life to go on with; the engine drops all others. None keeps all.
        config: Heartbeat, idle deadline and reconnection.
        clock: Monotonic seconds, for tests.
        sleep: For tests.
        rng: Jitter of the reconnection.

    Attributes:
        progress: The engine's latest figures.
        connected: Whether the stream is open and welcomed.
        engine_id: Of the engine behind the stream, once welcomed.
        last_contact_s: When the engine was last heard, on `clock`; 0 if never.

    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        consumer_id: str,
        purpose: Purpose,
        incarnation: int,
        cursor: int = 0,
        keep: Collection[GroupKey] | None = None,
        config: ConsumerConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self._stub = pb_grpc.RolloutServiceStub(channel)
        self._consumer_id = consumer_id
        self._purpose = purpose
        self._incarnation = incarnation
        self._config = config or ConsumerConfig()
        self._clock = clock
        self._sleep = sleep
        self._rng = rng or random.Random()  # noqa: S311 -- jitter
        self._book = ConsumerBook(cursor, keep)
        self._commits: dict[GroupKey, pb.Commit] = {}
        self._refusals: dict[GroupKey, ServiceError] = {}
        self._assembly = GroupAssembly(self._config.max_attempt_bytes)
        self._finished: deque[FinishedGroup] = deque()
        self._changed = asyncio.Condition()
        self._outbox: asyncio.Queue[pb.RunGroupsRequest] | None = None
        self._ended: BaseException | None = None
        self._end = asyncio.Event()
        self.progress: Progress | None = None
        self.connected = False
        self.engine_id = ""
        self.last_contact_s = 0.0

    @property
    def outstanding(self) -> frozenset[GroupKey]:
        """Groups assigned and not finished, those of an earlier life included."""
        return self._book.outstanding

    @property
    def held(self) -> frozenset[GroupKey]:
        """Groups assigned and not received, those of an earlier life included."""
        return self._book.held

    @property
    def uncommitted(self) -> frozenset[GroupKey]:
        """Groups whose decision the engine has not acknowledged yet."""
        return frozenset(self._commits)

    @property
    def cursor(self) -> int:
        """Of the last group received."""
        return self._book.cursor

    async def run(self) -> None:
        """Own the connection; returns only by cancellation.

        Raises:
            ServiceError: What no reconnection mends: `FENCED` (a newer incarnation took over),
                or a request that the engine will never accept.

        """
        try:
            await self._keep_connected()
        except BaseException as error:
            self._ended = error
            raise
        finally:
            self._end.set()
            await self._disconnected()

    async def _keep_connected(self) -> None:
        config = self._config
        backoff = Backoff(config.reconnect_initial_s, 2.0, config.reconnect_max_s)
        failures = 0
        while True:
            error: ServiceError = Unavailable("the engine ended the stream")
            try:
                await self._converse()
            except ServiceError as failure:
                error = failure
            failures = 1 if self.connected else failures + 1
            await self._disconnected()
            if error.reason in _FATAL:
                raise error
            if error.reason is Reason.CURSOR_EXPIRED:
                self._book.ledger_replaced()
            wait_s = max(backoff.delay_s(failures, self._rng.random()), error.retry_after_s or 0.0)
            logger.log(
                logging.WARNING if failures == 1 else logging.INFO,
                "%s: %s; connecting again in %.1f s",
                self._name,
                error,
                wait_s,
            )
            await self._sleep(wait_s)

    async def assign(self, assignment: Assignment) -> None:
        """Hand over a group; returns once it is in the engine's ledger.

        Waits for a credit. Assigning a group that the engine knows already changes nothing, needs
        no credit, and delivers it again if it had been received but not committed.

        Raises:
            ServiceError: The engine refuses the group (`STALE_EPOCH`, `INVALID_ARGUMENT`, ...), or
                the stream is closed for good.

        """
        key = assignment.key
        try:
            async with self._changed:
                await self._wait(lambda: self._book.has_credit_for(key))
                self._refusals.pop(key, None)
                self._book.want(assignment)
                self._send_wanted()
                await self._wait(
                    lambda: self._book.standing(key) not in (Standing.WANTED, Standing.SENT)
                )
        except asyncio.CancelledError:
            if self._book.standing(key) in (Standing.WANTED, Standing.SENT):
                self._withdraw(key, "the assignment was cancelled")
            raise
        refusal = self._refusals.pop(key, None)
        if refusal is not None:
            raise refusal

    async def next_finished(self) -> FinishedGroup:
        """Return the next finished group, whole and verified, in the order of cursors.

        Raises:
            ServiceError: The stream is closed for good and nothing is left.

        """
        async with self._changed:
            # Taken only after the wait: a caller that gives up waiting loses nothing.
            await self._wait(lambda: bool(self._finished))
            return self._finished.popleft()

    async def receive(self, cursor: int) -> None:
        """Acknowledge every group up to the cursor; their credits return."""
        self._book.receive(cursor)
        self._send(pb.RunGroupsRequest(receipt=pb.Receipt(cursor=cursor)))
        self._send_wanted()  # what was put off for want of a credit
        await self._notify()

    async def commit(self, key: GroupKey, decision: Decision, step: int = 0) -> None:
        """Tell what became of a group, once that is on disk here; the engine may then drop it.

        Returns at once. The message is repeated over reconnections until the engine acknowledges;
        `settled` waits for that.
        """
        commit = pb.Commit(
            group_id=key.group_id,
            assignment_epoch=key.epoch,
            decision=DECISIONS.to_proto(decision),
            step=step,
        )
        self._commits[key] = commit
        self._send(pb.RunGroupsRequest(commit=commit))

    async def settled(self) -> None:
        """Wait until the engine has acknowledged every commit.

        Raises:
            ServiceError: The stream is closed for good.

        """
        async with self._changed:
            await self._wait(lambda: not self._commits)

    async def withdraw(self, key: GroupKey, reason: str) -> None:
        """Give a group up: its attempts are cancelled and it will not be delivered."""
        self._withdraw(key, reason)
        await self._notify()

    @property
    def _name(self) -> str:
        return f"consumer {self._consumer_id} at {self.engine_id or 'its engine'}"

    def _withdraw(self, key: GroupKey, reason: str) -> None:
        self._book.withdraw(key, reason)
        self._assembly.drop(key)
        self._send(_withdrawal(key, reason))

    async def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait, holding `_changed`, until the condition holds or the stream is closed for good."""
        await self._changed.wait_for(lambda: condition() or self._end.is_set())
        if not condition():
            self._check_open()

    def _check_open(self) -> None:
        if isinstance(self._ended, ServiceError):
            raise service_error(
                self._ended.reason, f"the stream is closed: {self._ended.message}"
            ) from self._ended
        if self._end.is_set():
            raise Unavailable(f"{self._name} is not running any more", retryable=False)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _disconnected(self) -> None:
        self.connected = False
        self._outbox = None
        self._assembly.clear()
        await self._notify()

    def _send(self, request: pb.RunGroupsRequest) -> None:
        # Without a connection nothing is queued: what matters is sent again after the Welcome.
        if self._outbox is not None and self.connected:
            self._outbox.put_nowait(request)

    def _send_wanted(self) -> None:
        if self.connected:
            for assignment in self._book.to_send():
                self._send(pb.RunGroupsRequest(assign=wire.assignment_to_proto(assignment)))

    async def _converse(self) -> None:
        outbox: asyncio.Queue[pb.RunGroupsRequest] = asyncio.Queue()
        outbox.put_nowait(
            pb.RunGroupsRequest(
                hello=pb.Hello(
                    consumer_id=self._consumer_id,
                    purpose=PURPOSES.to_proto(self._purpose),
                    cursor=self._book.cursor,
                    incarnation=self._incarnation,
                )
            )
        )
        keep = self._book.to_forget_all_but
        if keep is not None:
            kept = [pb.GroupKey(group_id=k.group_id, assignment_epoch=k.epoch) for k in keep]
            outbox.put_nowait(pb.RunGroupsRequest(forget=pb.Forget(keep=kept)))
        self._outbox = outbox
        call = self._stub.RunGroups(self._requests(outbox))
        try:
            responses = with_idle_deadline(call, self._config.idle_s, f"RunGroups of {self._name}")
            async for response in responses:
                self.last_contact_s = self._clock()
                await self._handle(response)
        finally:
            call.cancel()

    async def _requests(
        self, outbox: asyncio.Queue[pb.RunGroupsRequest]
    ) -> AsyncIterator[pb.RunGroupsRequest]:
        while True:
            try:
                async with asyncio.timeout(self._config.heartbeat_s):
                    request = await outbox.get()
            except TimeoutError:
                self._send_wanted()
                request = pb.RunGroupsRequest(heartbeat=pb.Heartbeat(sent_at_s=time.time()))
            yield request

    async def _handle(self, response: pb.RunGroupsResponse) -> None:
        match response.WhichOneof("message"):
            case "attempt_chunk":
                self._assembly.add(response.attempt_chunk)
            case "group_finished":
                await self._take_group(response.group_finished)
            case "accepted":
                self._book.forgot()
                self._book.accepted(_key(response.accepted))
                await self._notify()
            case "rejected":
                await self._take_refusal(response.rejected)
            case "committed":
                self._book.forgot()
                key = _key(response.committed)
                self._commits.pop(key, None)
                self._book.settled(key)
                await self._notify()
            case "progress":
                self.progress = wire.progress_from_proto(response.progress)
            case "welcome":
                await self._welcomed(response.welcome)
            case _:  # a heartbeat, or a newer engine's message
                pass

    async def _welcomed(self, welcome: pb.Welcome) -> None:
        self.engine_id = welcome.engine_id
        alive = {_key(known) for known in welcome.groups if known.state in _ALIVE}
        self._book.connected(welcome.credits, alive)
        self.connected = True
        for key, reason in self._book.withdrawals.items():
            if key in alive:
                self._send(_withdrawal(key, reason))
        for commit in self._commits.values():
            self._send(pb.RunGroupsRequest(commit=commit))
        self._send_wanted()
        await self._notify()

    async def _take_refusal(self, rejected: pb.Rejected) -> None:
        self._book.forgot()
        key = _key(rejected)
        reason = Reason.__members__.get(rejected.reason, Reason.INTERNAL)
        if reason in _PUT_OFF:
            # Sent again with the next heartbeat.
            self._book.put_off(key)
            return
        if self._book.standing(key) is not None:
            logger.warning("%s refuses group %s: %s", self._name, key, rejected.message)
            self._refusals[key] = service_error(reason, rejected.message)
        self._book.refused(key)
        await self._notify()

    async def _take_group(self, finished: pb.GroupFinished) -> None:
        key = _key(finished)
        if not self._book.expects(key, finished.cursor):
            self._assembly.drop(key)
            return
        group = self._assembly.take(finished)
        # Only now: had it not been whole, it must be delivered again.
        self._book.delivered(key, finished.cursor)
        self._finished.append(group)
        await self._notify()


def _key(
    message: pb.Accepted | pb.Rejected | pb.Committed | pb.GroupFinished | pb.KnownGroup,
) -> GroupKey:
    return GroupKey(message.group_id, message.assignment_epoch)


def _withdrawal(key: GroupKey, reason: str) -> pb.RunGroupsRequest:
    return pb.RunGroupsRequest(
        withdraw=pb.Withdraw(group_id=key.group_id, assignment_epoch=key.epoch, reason=reason)
    )


__all__ = ["ConsumerConfig", "GroupConsumer"]
