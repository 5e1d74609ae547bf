"""A consumer's book against an engine that restarts: each group once, no credit lost."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rollout_engine.core.consumption import ConsumerBook, Standing
from rollout_engine.types import Assignment, GroupKey

CREDITS = 3


def key(number: int) -> GroupKey:
    return GroupKey(f"g{number}", 0)


def assignment(number: int) -> Assignment:
    return Assignment(key(number), "t", 1)


@dataclass
class Engine:
    """What an engine keeps of one consumer."""

    running: set[GroupKey] = field(default_factory=set)
    finished: dict[GroupKey, int] = field(default_factory=dict)
    received: dict[GroupKey, int] = field(default_factory=dict)
    cursor: int = 100

    def take(self, wanted: GroupKey) -> bool:
        if wanted in self.received:
            del self.received[wanted]
            self.finish(wanted)
        elif wanted not in self.running and wanted not in self.finished:
            if len(self.running) + len(self.finished) >= CREDITS:
                return False
            self.running.add(wanted)
        return True

    def finish(self, done: GroupKey) -> None:
        self.running.discard(done)
        self.cursor += 1
        self.finished[done] = self.cursor

    def receipt(self, cursor: int) -> None:
        for done, at in list(self.finished.items()):
            if at <= cursor:
                self.received[done] = self.finished.pop(done)

    def hello(self, cursor: int) -> set[GroupKey]:
        for done, at in list(self.received.items()):
            if at > cursor:
                self.finished[done] = self.received.pop(done)
        self.receipt(cursor)
        return self.running | self.finished.keys()


class ConsumerMachine(RuleBasedStateMachine):
    """Messages between book and engine are handed over at once, or lost with the connection."""

    @initialize()
    def begin(self) -> None:
        self.engine = Engine()
        self.book = ConsumerBook(0, None)
        self.connected = False
        self.sent_to = 0
        self.next = 0
        self.handed: list[GroupKey] = []
        self.cursors: list[int] = []
        self.given_up: set[GroupKey] = set()
        self.connect()

    def connect(self) -> None:
        known = self.engine.hello(self.book.cursor)
        self.book.connected(CREDITS, known)
        for gone in self.book.withdrawals:
            self.engine.running.discard(gone)
            self.engine.finished.pop(gone, None)
        self.connected = True
        self.sent_to = self.book.cursor
        self.send(lost=False)

    def send(self, lost: bool) -> None:
        for wanted in self.book.to_send():
            if lost:
                continue
            if self.engine.take(wanted.key):
                self.book.accepted(wanted.key)
            else:
                self.book.put_off(wanted.key)

    @rule(lost=st.booleans())
    def assign(self, lost: bool) -> None:
        wanted = assignment(self.next)
        if not self.book.has_credit_for(wanted.key):
            return
        self.next += 1
        self.book.want(wanted)
        if self.connected:
            self.send(lost)
            self.connected = not lost

    @precondition(lambda self: self.next > 0)
    @rule(data=st.data())
    def assign_again(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, self.next - 1))
        if key(number) in self.handed or key(number) in self.given_up:
            return
        self.book.want(assignment(number))
        if self.connected:
            self.send(lost=False)

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.engine.finish(data.draw(st.sampled_from(sorted(self.engine.running))))

    @precondition(lambda self: self.connected)
    @rule()
    def deliver(self) -> None:
        following = sorted(
            (cursor, done) for done, cursor in self.engine.finished.items() if cursor > self.sent_to
        )
        if not following:
            return
        cursor, done = following[0]
        self.sent_to = cursor
        if self.book.expects(done, cursor):
            self.book.delivered(done, cursor)
            self.handed.append(done)
            self.cursors.append(cursor)

    @precondition(lambda self: self.cursors)
    @rule(lost=st.booleans())
    def receive(self, lost: bool) -> None:
        self.book.receive(self.cursors[-1])
        if self.connected and not lost:
            self.engine.receipt(self.cursors[-1])

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        waiting = sorted(self.book.outstanding)
        if not waiting:
            return
        gone = data.draw(st.sampled_from(waiting))
        self.book.withdraw(gone, "no")
        self.given_up.add(gone)
        if self.connected:
            self.engine.running.discard(gone)
            self.engine.finished.pop(gone, None)

    @rule()
    def lose_connection(self) -> None:
        self.connected = False

    @precondition(lambda self: not self.connected)
    @rule(ledger_lost=st.booleans())
    def reconnect(self, ledger_lost: bool) -> None:
        if ledger_lost:
            # Its cursors begin above those of the ledger it replaces.
            self.engine = Engine(cursor=self.engine.cursor + 1000)
        self.connect()

    @invariant()
    def each_group_is_handed_on_once_and_in_order(self) -> None:
        assert len(self.handed) == len(set(self.handed))
        assert self.cursors == sorted(self.cursors)
        assert not self.given_up & {k for k in self.handed if self.book.standing(k) is not None}

    @invariant()
    def credits_are_never_overdrawn(self) -> None:
        book = self.book
        entries = [k for k in map(key, range(self.next)) if book.standing(k) is not None]
        assert len(entries) <= CREDITS

    def teardown(self) -> None:
        """Whatever has happened, everything assigned comes in the end."""
        self.connect()
        for _ in range(3 * CREDITS):
            for running in sorted(self.engine.running):
                self.engine.finish(running)
            for _ in range(CREDITS):
                self.deliver()
            if self.cursors:
                self.receive(lost=False)
            self.send(lost=False)
        missing = set(map(key, range(self.next))) - set(self.handed) - self.given_up
        assert not missing
        assert not self.book.outstanding


TestConsumer = ConsumerMachine.TestCase
TestConsumer.settings = settings(max_examples=150, stateful_step_count=40)


def test_only_the_groups_to_keep_survive_a_resume() -> None:
    book = ConsumerBook(5, keep=[key(1)])
    book.connected(CREDITS, [key(1), key(2)])
    assert book.outstanding == {key(1)}
    assert book.to_forget_all_but == frozenset({key(1)})
    assert not book.expects(key(2), 6)
    book.want(assignment(3))
    assert book.to_forget_all_but == frozenset({key(1), key(3)})
    book.forgot()
    assert book.to_forget_all_but is None


def test_a_refused_group_is_gone_and_a_put_off_one_waits() -> None:
    book = ConsumerBook(0, None)
    book.connected(CREDITS, [])
    for number in (1, 2):
        book.want(assignment(number))
    book.to_send()
    book.refused(key(1))
    book.put_off(key(2))
    assert book.standing(key(1)) is None
    assert [a.key for a in book.to_send()] == [key(2)]
    book.accepted(key(2))
    book.refused(key(2))  # too late to be refused
    assert book.standing(key(2)) is Standing.ACCEPTED


def test_another_ledgers_cursors_start_over() -> None:
    book = ConsumerBook(500, None)
    book.ledger_replaced()
    book.connected(CREDITS, [key(1)])
    assert book.cursor == 0
    assert book.expects(key(1), 3)
