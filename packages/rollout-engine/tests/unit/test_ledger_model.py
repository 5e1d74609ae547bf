"""The ledger against a plain model of it, over any order of steps, lost commits and reopenings."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rollout_engine.core.group import SlotStatus
from rollout_engine.ledger.database import Database
from rollout_engine.ledger.opening import open_ledger
from rollout_engine.ledger.reads import known_groups, running_groups
from rollout_engine.ledger.rows import Delivery, EndedTry, GroupRef, GroupStanding
from rollout_engine.types import Decision, GroupKey, Outcome, Purpose
from service_kit.errors import Reason, ServiceError

ME = "me"
ATTEMPTS = 2
CREDITS = 3
T = TypeVar("T")


@dataclass
class ModelGroup:
    standing: GroupStanding = GroupStanding.RUNNING
    cursor: int = 0
    ended: set[int] = field(default_factory=set)


class LedgerMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ledger-model-"))
        self.groups: dict[str, ModelGroup] = {}
        self.newest = 100 << 20
        self.received = self.newest
        self.next = 0
        self.open()
        self.step(lambda db: db.hello(ME, Purpose.TRAINING, 1, 0))

    def open(self) -> None:
        opened = open_ledger(self.folder, file_bytes=150, keep_committed=100, now_s=100.0)
        self.opened = opened

    def close(self) -> None:
        self.opened.arrays.close()
        self.opened.sql.close()
        os.close(self.opened.lock_file)

    def step(self, run: Callable[[Database], T]) -> T:
        sql = self.opened.sql
        sql.execute("BEGIN IMMEDIATE")
        try:
            result = run(self.opened.database)
        except ServiceError:
            sql.execute("ROLLBACK")
            raise
        sql.execute("COMMIT")
        for number in list(self.opened.database.emptied):
            if not self.opened.database.has_records(number):
                self.opened.arrays.delete(number)
        self.opened.database.emptied.clear()
        return result

    def refused(self, run: Callable[[Database], object]) -> Reason | None:
        try:
            self.step(run)
        except ServiceError as error:
            return error.reason
        return None

    def pick(self, data: st.DataObject, *standings: GroupStanding) -> str | None:
        names = sorted(n for n, g in self.groups.items() if g.standing in standings)
        return data.draw(st.sampled_from(names)) if names else None

    def in_use(self) -> int:
        using = (GroupStanding.RUNNING, GroupStanding.FINISHED)
        return sum(group.standing in using for group in self.groups.values())

    @staticmethod
    def ref(name: str) -> GroupRef:
        return GroupRef(ME, GroupKey(name, 0))

    @staticmethod
    def payload(name: str, index: int) -> bytes:
        return f"{name}/{index} ".encode() * 5

    def accept(self, name: str) -> Callable[[Database], object]:
        return lambda db: db.accept(
            self.ref(name),
            task_id="t",
            attempts=ATTEMPTS,
            assignment=b"a",
            credits_=CREDITS,
            now_s=1.0,
        )

    def ended(self, name: str, index: int) -> EndedTry:
        return EndedTry(
            self.ref(name),
            index,
            0,
            outcome=Outcome.SOLVED,
            turns=1,
            tokens=1,
            ended_at_s=1.0,
            final=True,
            payload=self.payload(name, index),
        )

    @rule()
    def assign(self) -> None:
        name = f"g{self.next}"
        reason = self.refused(self.accept(name))
        if self.in_use() >= CREDITS:
            assert reason is Reason.QUOTA_EXHAUSTED
        else:
            assert reason is None
            self.next += 1
            self.groups[name] = ModelGroup()

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def assign_again(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.groups)))
        group = self.groups[name]
        reason = self.refused(self.accept(name))
        if group.standing in (GroupStanding.COMMITTED, GroupStanding.WITHDRAWN):
            assert reason is Reason.ALREADY_EXISTS
            return
        assert reason is None
        if group.standing is GroupStanding.RECEIVED:
            self.newest += 1
            group.standing, group.cursor = GroupStanding.FINISHED, self.newest

    @rule(data=st.data(), index=st.integers(0, ATTEMPTS - 1))
    def end_attempt(self, data: st.DataObject, index: int) -> None:
        name = self.pick(data, *GroupStanding)
        if name is None or index in self.groups[name].ended:
            return
        running = self.groups[name].standing is GroupStanding.RUNNING
        assert self.step(lambda db: db.end_try(self.ended(name, index))) == running
        if running:
            self.groups[name].ended.add(index)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = self.pick(data, GroupStanding.RUNNING)
        if name is None or len(self.groups[name].ended) < ATTEMPTS:
            return
        cursor = self.step(lambda db: db.finish_group(self.ref(name), None))
        self.newest += 1
        assert cursor == self.newest
        self.groups[name].standing, self.groups[name].cursor = GroupStanding.FINISHED, cursor

    @rule(data=st.data())
    def receipt(self, data: st.DataObject) -> None:
        cursor = data.draw(st.integers(self.received, self.newest))
        self.step(lambda db: db.received(ME, cursor))
        self.received = max(self.received, cursor)
        self.model_receipt(cursor)

    def model_receipt(self, cursor: int) -> None:
        for group in self.groups.values():
            if group.standing is GroupStanding.FINISHED and group.cursor <= cursor:
                group.standing = GroupStanding.RECEIVED

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        cursor = data.draw(st.integers(100 << 20, self.newest))
        self.step(lambda db: db.hello(ME, Purpose.TRAINING, 1, cursor))
        for group in self.groups.values():
            if group.standing is GroupStanding.RECEIVED and group.cursor > cursor:
                group.standing = GroupStanding.FINISHED
        self.model_receipt(cursor)
        self.received = cursor

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name = self.pick(data, GroupStanding.RECEIVED, GroupStanding.WITHDRAWN)
        if name is not None:
            self.step(lambda db: db.commit(self.ref(name), Decision.TRAINED, 1))
            self.groups[name].standing = GroupStanding.COMMITTED

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        name = self.pick(data, *GroupStanding)
        if name is None:
            return
        self.step(lambda db: db.withdraw(self.ref(name)))
        if self.groups[name].standing is not GroupStanding.COMMITTED:
            self.groups[name].standing = GroupStanding.WITHDRAWN

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        keep = data.draw(st.sets(st.sampled_from(sorted(self.groups)))) if self.groups else set()
        keys = [self.ref(name).key for name in keep]
        running = self.step(lambda db: db.forget(ME, keys))
        expected = {
            name
            for name, group in self.groups.items()
            if name not in keep and group.standing is GroupStanding.RUNNING
        }
        assert {ref.key.group_id for ref in running} == expected
        self.groups = {name: g for name, g in self.groups.items() if name in keep}

    @rule(data=st.data(), dies=st.booleans())
    def reopen(self, data: st.DataObject, dies: bool) -> None:
        name = self.pick(data, GroupStanding.RUNNING)
        if dies and name is not None and 0 not in self.groups[name].ended:
            # Killed between the write and the commit: the bytes are there, no row names them.
            self.opened.sql.execute("BEGIN IMMEDIATE")
            self.opened.database.end_try(self.ended(name, 0))
        self.close()
        self.open()

    @invariant()
    def it_knows_what_the_model_knows(self) -> None:
        found = {
            known.key.group_id: (known.standing, known.cursor)
            for known in known_groups(self.opened.sql, ME)
        }
        assert found == {
            name: (group.standing, group.cursor)
            for name, group in self.groups.items()
            if group.standing is not GroupStanding.COMMITTED
        }

    @invariant()
    def everything_finished_can_be_delivered_in_order(self) -> None:
        expected = sorted(
            (group.cursor, name)
            for name, group in self.groups.items()
            if group.standing is GroupStanding.FINISHED
        )
        after = 0
        for cursor, name in expected:
            delivery = self.opened.database.deliverable(ME, after)
            assert isinstance(delivery, Delivery)
            assert (delivery.cursor, delivery.key.group_id) == (cursor, name)
            assert [a.payload for a in delivery.attempts] == [
                self.payload(name, index) for index in range(ATTEMPTS)
            ]
            after = cursor
        assert self.opened.database.deliverable(ME, after) is None

    @invariant()
    def running_groups_keep_what_has_ended(self) -> None:
        found = {
            g.ref.key.group_id: {
                i for i, slot in g.slots.items() if slot.status is SlotStatus.VALID
            }
            for g in running_groups(self.opened.sql)
        }
        assert found == {
            name: group.ended
            for name, group in self.groups.items()
            if group.standing is GroupStanding.RUNNING
        }

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.close()
            shutil.rmtree(self.folder)


TestLedgerModel = LedgerMachine.TestCase
TestLedgerModel.settings = settings(max_examples=25, stateful_step_count=40)
