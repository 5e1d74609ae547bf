"""Limiters never hand out too much, forget nobody, and serve the oldest group first."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rollout_engine.core.concurrency import SlotQueue
from rollout_engine.limiters import Limiter


def test_the_lowest_priority_number_is_served_first_then_the_oldest_request() -> None:
    queue: SlotQueue[str] = SlotQueue("agents", 1)
    assert queue.request("holder", (0,), 0.0)
    for ticket, priority in (("late group", (2,)), ("a", (1,)), ("b", (1,))):
        assert not queue.request(ticket, priority, 1.0)
    assert queue.release("holder", 2.0) == ["a"]
    assert queue.release("a", 3.0) == ["b"]
    assert queue.release("b", 4.0) == ["late group"]


def test_waits_and_queue_length_can_be_seen() -> None:
    queue: SlotQueue[str] = SlotQueue("engines", 1)
    queue.request("a", (), 0.0)
    queue.request("b", (), 1.0)
    queue.request("c", (), 4.0)
    queue.release("a", 6.0)
    status = queue.status(10.0)
    assert (status.in_use, status.waiting, status.limit) == (1, 1, 1)
    assert status.wait_p50_s == 2.5  # of 0 s and 5 s
    assert status.wait_max_s == 6.0  # c still waits


def test_zero_means_no_limit() -> None:
    queue: SlotQueue[int] = SlotQueue("sandboxes", 0)
    assert all(queue.request(ticket, (), 0.0) for ticket in range(1000))


@given(st.integers(1, 4))
def test_a_ticket_is_used_once_at_a_time(limit: int) -> None:
    queue: SlotQueue[str] = SlotQueue("x", limit)
    queue.request("a", (), 0.0)
    with pytest.raises(ValueError, match="in use"):
        queue.request("a", (), 0.0)
    with pytest.raises(ValueError, match="holds no slot"):
        queue.release("b", 0.0)


class SlotQueueMachine(RuleBasedStateMachine):
    """The queue against a plain model of who should hold a slot."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: SlotQueue[int] = SlotQueue("machine", 3)
        self.holders: set[int] = set()
        self.waiting: list[tuple[tuple[int, ...], int]] = []
        self.next = 0

    @rule(priority=st.integers(0, 3))
    def ask(self, priority: int) -> None:
        ticket, self.next = self.next, self.next + 1
        granted = self.queue.request(ticket, (priority,), float(ticket))
        assert granted == (len(self.holders) < 3 and not self.waiting)
        if granted:
            self.holders.add(ticket)
        else:
            self.waiting.append(((priority,), ticket))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.holders)))
        self.holders.remove(ticket)
        expected = [min(self.waiting)[1]] if self.waiting else []
        assert self.queue.release(ticket, 1000.0) == expected
        if expected:
            self.waiting.remove(min(self.waiting))
            self.holders.update(expected)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(entry)
        self.queue.withdraw(entry[1])

    @invariant()
    def counts_agree(self) -> None:
        assert self.queue.in_use == len(self.holders) <= 3
        assert self.queue.waiting == len(self.waiting)


TestSlotQueue = SlotQueueMachine.TestCase


async def test_a_cancelled_waiter_leaves_its_place_to_the_next() -> None:
    limiter = Limiter("agents", 1)
    order: list[str] = []

    async def work(name: str, gate: asyncio.Event) -> None:
        async with limiter.slot():
            order.append(name)
            await gate.wait()

    gate = asyncio.Event()
    tasks = {name: asyncio.create_task(work(name, gate)) for name in "abc"}
    await asyncio.sleep(0)
    tasks["b"].cancel()
    gate.set()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert order == ["a", "c"]
    assert limiter.status().in_use == 0


async def test_a_slot_granted_to_a_task_that_is_just_cancelled_is_passed_on() -> None:
    limiter = Limiter("agents", 1)
    entered: list[str] = []

    async def work(name: str) -> None:
        async with limiter.slot():
            entered.append(name)

    async with limiter.slot():
        first = asyncio.create_task(work("first"))
        second = asyncio.create_task(work("second"))
        await asyncio.sleep(0)
    first.cancel()  # after the grant, before the task runs
    await asyncio.gather(first, second, return_exceptions=True)
    assert entered == ["second"]
    assert limiter.status().in_use == 0


async def test_a_body_that_fails_gives_its_slot_back() -> None:
    limiter = Limiter("agents", 1)
    with pytest.raises(RuntimeError):
        async with limiter.slot():
            raise RuntimeError
    assert limiter.status().in_use == 0
