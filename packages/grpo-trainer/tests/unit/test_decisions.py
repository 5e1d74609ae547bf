"""The book of groups: one epoch accepted, nothing decided twice, commits after checkpoints."""

from __future__ import annotations

import json

import pytest
from grpo_trainer.core.decisions import Claim, GroupBook, LiveGroup, Phase, Reception
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)
from rollout_engine.types import Decision, GroupKey


def opened(book: GroupBook, engine: str = "e") -> LiveGroup:
    group = book.open("t")
    assert group is not None
    return book.place(group.key, engine)


def saved_and_restored(book: GroupBook) -> GroupBook:
    return GroupBook.restore(json.loads(json.dumps(book.snapshot())))


def test_a_group_goes_from_assigned_to_ready_to_decided() -> None:
    book = GroupBook("run/rl/")
    group = opened(book)
    assert group.key == GroupKey("run/rl/000000", 1)
    assert (book.in_flight, book.ready) == (1, 0)
    assert book.deliver(group.key, "t", "e", 5) is Reception.ACCEPTED
    assert (book.in_flight, book.ready) == (0, 1)
    book.decide(group.key, Decision.TRAINED, step=1)
    assert (book.in_flight, book.ready) == (0, 0)


def test_a_decision_may_be_told_only_once_a_checkpoint_holds_it() -> None:
    book = GroupBook("g")
    first, second = opened(book), opened(book)
    for cursor, group in enumerate((first, second), start=1):
        book.deliver(group.key, "t", "e", cursor)
    book.decide(first.key, Decision.TRAINED, step=1)
    held = book.pending
    book.decide(second.key, Decision.TRAINED, step=2)
    # The checkpoint was taken between the two.
    assert [v.key for v in book.checkpointed(held)] == [first.key]
    assert book.durable((second.key, "e")) is None
    book.committed((first.key, "e"))
    assert [v.key for v in book.checkpointed(book.pending)] == [second.key]


def test_only_the_newest_epoch_of_a_group_counts() -> None:
    book = GroupBook("g")
    lost = opened(book, "e1")
    again = book.place(book.reassign(lost.key).key, "e2")
    assert again.key.epoch == 2
    # The engine thought lost delivers after all; then the new one does.
    assert book.deliver(lost.key, "t", "e1", 1) is Reception.DECIDED
    assert book.deliver(again.key, "t", "e2", 1) is Reception.ACCEPTED
    verdicts = book.checkpointed(book.pending)
    assert [(v.key, v.engine, v.decision) for v in verdicts] == [
        (lost.key, "e1", Decision.WITHDRAWN)
    ]


def test_the_same_group_from_two_engines_counts_once() -> None:
    book = GroupBook("g")
    group = opened(book, "e1")
    assert book.deliver(group.key, "t", "e2", 1) is Reception.ACCEPTED
    assert book.deliver(group.key, "t", "e1", 1) is Reception.SUPERSEDED
    assert book.deliver(group.key, "t", "e2", 1) is Reception.REPEATED
    book.decide(group.key, Decision.TRAINED, step=1)
    assert {(v.engine, v.decision) for v in book.checkpointed(book.pending)} == {
        ("e1", Decision.WITHDRAWN),
        ("e2", Decision.TRAINED),
    }


def test_a_decided_group_that_comes_again_is_told_its_decision_again() -> None:
    book = GroupBook("g")
    group = opened(book)
    book.deliver(group.key, "t", "e", 1)
    book.decide(group.key, Decision.NO_VARIANCE)
    book.checkpointed(book.pending)
    resumed = saved_and_restored(book)
    assert resumed.deliver(group.key, "t", "e", 1) is Reception.DECIDED
    verdict = resumed.durable((group.key, "e"))
    assert verdict is not None
    assert verdict.decision is Decision.NO_VARIANCE


def test_a_group_decided_and_committed_long_ago_is_never_accepted_again() -> None:
    book = GroupBook("g")
    group = opened(book)
    book.deliver(group.key, "t", "e", 1)
    book.decide(group.key, Decision.TRAINED, step=1)
    book.checkpointed(book.pending)
    book.committed((group.key, "e"))
    assert saved_and_restored(book).deliver(group.key, "t", "e", 1) is Reception.SUPERSEDED


def test_deciding_twice_is_refused() -> None:
    book = GroupBook("g")
    group = opened(book)
    book.decide(group.key, Decision.WITHDRAWN)
    with pytest.raises(KeyError):
        book.decide(group.key, Decision.TRAINED, step=1)


def test_groups_assigned_after_the_checkpoint_are_adopted_when_they_arrive() -> None:
    book = GroupBook("g")
    opened(book)
    checkpoint = book.snapshot()
    for _ in range(3):
        opened(book)
    resumed = GroupBook.restore(checkpoint)
    key = GroupKey("g000002", 1)
    assert resumed.deliver(key, "other", "e", 9) is Reception.ACCEPTED
    again = resumed.open("t")
    assert again is not None
    assert again.key == GroupKey("g000001", 1)
    adopted = resumed.open("t")
    assert adopted is not None
    assert (adopted.key, adopted.phase, adopted.task_id) == (key, Phase.READY, "other")


def test_an_adopted_group_that_is_decided_early_is_not_opened_again() -> None:
    book = GroupBook("g")
    key = GroupKey("g000000", 1)
    book.deliver(key, "t", "e", 9)
    book.decide(key, Decision.NO_VARIANCE)
    book = saved_and_restored(book)
    assert book.deliver(key, "t", "e", 9) is Reception.DECIDED
    assert book.open("t") is None
    following = book.open("t")
    assert following is not None
    assert following.ordinal == 1


def test_ready_groups_are_awaited_again_after_a_resume() -> None:
    book = GroupBook("g")
    first, second = opened(book), opened(book)
    book.deliver(second.key, "t", "e", 7)
    book.deliver(first.key, "t", "e", 8)
    book.decide(first.key, Decision.TRAINED, step=1)
    # The engine has to start again before the undecided one, though a later one is decided.
    assert book.cursors == {"e": 6}
    resumed = saved_and_restored(book)
    assert [group.phase for group in resumed.live] == [Phase.ASSIGNED]
    assert resumed.deliver(second.key, "t", "e", 7) is Reception.ACCEPTED
    assert resumed.deliver(first.key, "t", "e", 8) is Reception.DECIDED


def test_an_epoch_that_a_crash_made_the_book_forget_is_accepted_when_it_arrives() -> None:
    book = GroupBook("g")
    first = opened(book)
    checkpoint = book.snapshot()
    second = book.place(book.reassign(first.key).key, "e")
    resumed = GroupBook.restore(checkpoint)
    assert resumed.deliver(second.key, "t", "e", 5) is Reception.ACCEPTED
    assert resumed.deliver(first.key, "t", "e", 6) is Reception.DECIDED
    resumed.decide(second.key, Decision.TRAINED, step=1)
    fates = {v.key.epoch: v.decision for v in resumed.checkpointed(resumed.pending)}
    assert fates == {1: Decision.WITHDRAWN, 2: Decision.TRAINED}


def test_a_later_epoch_does_not_replace_one_that_is_here() -> None:
    book = GroupBook("g")
    first = opened(book)
    later = GroupKey(first.key.group_id, 2)
    assert book.deliver(first.key, "t", "e", 5) is Reception.ACCEPTED
    assert book.deliver(later, "t", "e", 6) is Reception.SUPERSEDED
    assert book.find(first.key) is not None


def test_an_earlier_epoch_never_replaces_a_later_one() -> None:
    book = GroupBook("g")
    first = opened(book)
    checkpoint = book.snapshot()
    book.reassign(first.key)
    resumed = GroupBook.restore(checkpoint)
    again = resumed.reassign(first.key)
    fresh = GroupBook.restore(resumed.snapshot())
    fresh._durable.clear()
    assert fresh.deliver(first.key, "t", "e", 3) is Reception.SUPERSEDED
    assert fresh.find(again.key) is not None


def test_a_group_is_never_assigned_again_under_an_epoch_that_is_decided() -> None:
    book = GroupBook("g")
    first = opened(book)
    book.deliver(first.key, "t", "e", 1)
    # A life that is forgotten had assigned epochs 2 and 3.
    for epoch in (2, 3):
        forgotten = GroupKey(first.key.group_id, epoch)
        assert book.deliver(forgotten, "t", "e", epoch) is Reception.SUPERSEDED
    assert book.reassign(first.key, Decision.STALE).key.epoch == 4


def test_earlier_epochs_of_an_adopted_group_are_settled_with_it() -> None:
    book = GroupBook("g")
    assert book.deliver(GroupKey("g000000", 3), "t", "e", 9) is Reception.ACCEPTED
    book.decide(GroupKey("g000000", 3), Decision.STALE)
    fates = {v.key.epoch: v.decision.value for v in book.checkpointed(book.pending)}
    assert fates == {1: "WITHDRAWN", 2: "WITHDRAWN", 3: "STALE"}


@pytest.mark.parametrize("foreign", ["other000001", "g-1", "gx", "g"])
def test_groups_of_another_stage_are_not_taken_in(foreign: str) -> None:
    book = GroupBook("g")
    assert book.deliver(GroupKey(foreign, 1), "t", "e", 1) is Reception.SUPERSEDED


class TrainerLives(RuleBasedStateMachine):
    """A trainer that is killed at any instant, against an engine that keeps what is uncommitted."""

    assigned = Bundle("assigned")

    @initialize()
    def begin(self) -> None:
        self.book = GroupBook("g")
        self.disk = self.book.snapshot()
        self.kept: dict[GroupKey, int] = {}
        self.cursor = 0
        self.committed: dict[GroupKey, Decision] = {}
        # What the weights of the newest checkpoint, and those in memory, were trained on.
        self.trained_on_disk: list[str] = []
        self.trained: list[str] = []

    @rule(target=assigned)
    def assign(self) -> GroupKey | object:
        group = self.book.open("t")
        if group is None or group.phase is Phase.READY:
            return multiple()
        self.book.place(group.key, "e")
        return group.key

    @rule(key=consumes(assigned))
    def finish(self, key: GroupKey) -> None:
        if key not in self.kept and key not in self.committed:
            self.cursor += 1
            self.kept[key] = self.cursor

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        if self.kept:
            key = data.draw(st.sampled_from(sorted(self.kept)))
            self.book.deliver(key, "t", "e", self.kept[key])

    @rule()
    def train(self) -> None:
        for group in self.book.live:
            if group.phase is Phase.READY:
                self.book.decide(group.key, Decision.TRAINED, step=len(self.trained) + 1)
                self.trained.append(group.key.group_id)
                return

    @rule(target=assigned, data=st.data())
    def reassign(self, data: st.DataObject) -> GroupKey | object:
        flying = [g.key for g in self.book.live if g.phase is Phase.ASSIGNED]
        if not flying:
            return multiple()
        key = self.book.reassign(data.draw(st.sampled_from(flying))).key
        self.book.place(key, "e")
        return key

    @rule(commit=st.booleans())
    def checkpoint(self, commit: bool) -> None:
        held: tuple[Claim, ...] = self.book.pending
        self.disk = json.loads(json.dumps(self.book.snapshot()))
        self.trained_on_disk = list(self.trained)
        verdicts = self.book.checkpointed(held)
        if commit:
            for verdict in verdicts:
                self.committed[verdict.key] = verdict.decision
                self.kept.pop(verdict.key, None)
                self.book.committed(verdict.claim)

    @rule(target=assigned)
    def kill_and_resume(self) -> object:
        self.book = GroupBook.restore(self.disk)
        self.trained = list(self.trained_on_disk)
        # What was in flight may have been lost with its engine: assigned again, it can finish.
        return multiple(*(group.key for group in self.book.live))

    def teardown(self) -> None:
        """Whatever happened, every group that is awaited can still arrive."""
        if not hasattr(self, "book"):
            return
        newest: dict[str, int] = {}
        for key in (*self.kept, *self.committed):
            newest[key.group_id] = max(key.epoch, newest.get(key.group_id, 0))
        for group in self.book.live:
            key = group.key
            # An engine refuses an epoch that is committed, or older than one it knows.
            while key in self.committed or key.epoch < newest.get(key.group_id, 0):
                if key in self.kept:
                    break
                key = self.book.reassign(key).key
            self.cursor += 1
            received = self.book.deliver(key, "t", "e", self.kept.get(key, self.cursor))
            arrived = self.book.find(key)
            assert received in (Reception.ACCEPTED, Reception.REPEATED), (received, key)
            assert arrived is not None
            assert arrived.phase is Phase.READY

    @invariant()
    def nothing_is_trained_twice_in_one_lineage(self) -> None:
        assert len(self.trained) == len(set(self.trained))

    @invariant()
    def the_engine_drops_only_what_the_checkpoint_holds(self) -> None:
        on_disk = set(self.trained_on_disk)
        for key, decision in self.committed.items():
            if decision is Decision.TRAINED:
                assert key.group_id in on_disk


TestTrainerLives = TrainerLives.TestCase
TestTrainerLives.settings = settings(max_examples=60, stateful_step_count=40)
