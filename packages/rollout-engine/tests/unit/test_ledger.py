"""The ledger's promises while it lives; test_ledger_kills.py has those after a death."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from rollout_engine.core.group import SlotStatus
from rollout_engine.errors import (
    LedgerDiskFullError,
    LedgerError,
    LedgerUnusableError,
)
from rollout_engine.ledger.rows import (
    Acceptance,
    Delivery,
    EndedTry,
    GroupRef,
    GroupStanding,
    ResumedGroup,
)
from rollout_engine.ledger.store import Ledger
from rollout_engine.types import (
    Decision,
    Fault,
    FaultCause,
    FaultStage,
    GroupKey,
    Outcome,
    Purpose,
)
from service_kit.errors import Reason, ServiceError

ME = "trainer"
BORN_S = 1000.0
FAULT = Fault(FaultStage.COMMAND, FaultCause.SANDBOX, "gone")


def ref(name: str = "g", epoch: int = 0, consumer: str = ME) -> GroupRef:
    return GroupRef(consumer, GroupKey(name, epoch))


def ended(group: GroupRef, index: int = 0, try_number: int = 0, **changes: object) -> EndedTry:
    fields: dict[str, object] = {
        "outcome": Outcome.SOLVED,
        "turns": 2,
        "tokens": 9,
        "ended_at_s": 5.0,
        "final": True,
        "payload": f"{group}/{index}".encode(),
        **changes,
    }
    return EndedTry(group, index, try_number, **fields)  # type: ignore[arg-type]


def faulted(group: GroupRef, index: int = 0, try_number: int = 0) -> EndedTry:
    return ended(
        group,
        index,
        try_number,
        outcome=Outcome.FAULT,
        fault=FAULT,
        final=False,
        counted=True,
        payload=None,
    )


async def accept(
    ledger: Ledger, group: GroupRef, attempts: int = 1, credits_: int = 99
) -> Acceptance:
    return await ledger.accept(
        group, task_id="t", attempts=attempts, assignment=b"assignment", credits_=credits_
    )


async def finish(ledger: Ledger, group: GroupRef, attempts: int = 1) -> int:
    for index in range(attempts):
        assert await ledger.end_try(ended(group, index))
    cursor = await ledger.finish_group(group)
    assert cursor is not None
    return cursor


async def hello(ledger: Ledger, cursor: int = 0, incarnation: int = 1) -> dict[str, str]:
    found = await ledger.hello(ME, Purpose.TRAINING, incarnation, cursor)
    return {known.key.group_id: known.standing.value for known in found.groups}


async def deliveries(ledger: Ledger, after: int = 0) -> list[str]:
    names = []
    while isinstance(delivery := await ledger.deliverable(ME, after), Delivery):
        names.append(delivery.key.group_id)
        after = delivery.cursor
    return names


async def open_ledger(folder: Path, **options: object) -> Ledger:
    return await Ledger.open(folder, wall_clock=lambda: BORN_S, **options)  # type: ignore[arg-type]


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    made = await open_ledger(tmp_path)
    await hello(made)
    yield made
    await made.close()


async def test_a_finished_group_is_delivered_with_the_bytes_that_were_stored(
    ledger: Ledger,
) -> None:
    await accept(ledger, ref(), attempts=2)
    await ledger.end_try(faulted(ref(), index=1))
    await ledger.end_try(ended(ref(), 0))
    assert await ledger.deliverable(ME, 0) is None
    await ledger.end_try(ended(ref(), 1, try_number=1))
    cursor = await ledger.finish_group(ref())
    delivery = await ledger.deliverable(ME, 0)
    assert isinstance(delivery, Delivery)
    assert (delivery.key, delivery.task_id, delivery.cursor) == (ref().key, "t", cursor)
    assert [a.payload for a in delivery.attempts] == [b"g@0 of trainer/0", b"g@0 of trainer/1"]
    assert [(f.attempt.index, f.fault, f.tokens) for f in delivery.faulted_tries] == [(1, FAULT, 9)]
    assert delivery.quarantined is None


async def test_groups_are_delivered_in_the_order_in_which_they_finish(ledger: Ledger) -> None:
    for name in "abc":
        await accept(ledger, ref(name))
    cursors = [await finish(ledger, ref(name)) for name in "cab"]
    assert cursors == sorted(cursors)
    assert await deliveries(ledger) == ["c", "a", "b"]
    assert await deliveries(ledger, after=cursors[0]) == ["a", "b"]


async def test_a_receipt_covers_everything_up_to_its_cursor(ledger: Ledger) -> None:
    for name in "ab":
        await accept(ledger, ref(name))
    cursor = await finish(ledger, ref("a"))
    await finish(ledger, ref("b"))
    await ledger.received(ME, cursor)
    assert await deliveries(ledger) == ["b"]


async def test_a_resume_at_an_older_cursor_delivers_exactly_the_uncommitted_again(
    ledger: Ledger,
) -> None:
    cursors = {}
    for name in "abcd":
        await accept(ledger, ref(name))
        cursors[name] = await finish(ledger, ref(name))
    await ledger.received(ME, cursors["d"])
    await ledger.commit(ref("b"), Decision.TRAINED, step=3)
    assert await hello(ledger, cursor=cursors["a"]) == {
        "a": "RECEIVED",
        "c": "FINISHED",
        "d": "FINISHED",
    }
    assert await deliveries(ledger, after=cursors["a"]) == ["c", "d"]


async def test_a_hello_counts_as_receipt_of_what_its_cursor_covers(ledger: Ledger) -> None:
    await accept(ledger, ref())
    cursor = await finish(ledger, ref())
    assert await hello(ledger, cursor=cursor) == {"g": "RECEIVED"}


async def test_an_older_incarnation_is_fenced(ledger: Ledger) -> None:
    await hello(ledger, incarnation=4)
    with pytest.raises(ServiceError) as caught:
        await hello(ledger, incarnation=3)
    assert caught.value.reason is Reason.FENCED


async def test_a_cursor_of_another_ledger_is_refused(ledger: Ledger) -> None:
    with pytest.raises(ServiceError) as caught:
        await hello(ledger, cursor=10**15)
    assert caught.value.reason is Reason.CURSOR_EXPIRED


async def test_a_new_ledgers_cursors_are_above_those_of_an_older_one(tmp_path: Path) -> None:
    older = await Ledger.open(tmp_path / "old", wall_clock=lambda: 100.0)
    newer = await Ledger.open(tmp_path / "new", wall_clock=lambda: 101.0)
    cursors = []
    for made in (older, newer):
        await hello(made)
        await accept(made, ref())
        cursors.append(await finish(made, ref()))
        await made.close()
    assert cursors[0] + 1000 < cursors[1]


async def test_assigning_again_changes_nothing(ledger: Ledger) -> None:
    first = await accept(ledger, ref(), credits_=1)
    again = await accept(ledger, ref(), credits_=1)
    assert (first.new, again.new, again.redelivered) == (True, False, False)
    assert first.sequence == again.sequence


async def test_assigning_a_received_group_again_delivers_it_under_a_new_cursor(
    ledger: Ledger,
) -> None:
    await accept(ledger, ref())
    cursor = await finish(ledger, ref())
    await ledger.received(ME, cursor)
    assert (await accept(ledger, ref())).redelivered
    assert await deliveries(ledger, after=cursor) == ["g"]


@pytest.mark.parametrize(
    ("reason", "prepare", "group"),
    [
        (Reason.STALE_EPOCH, lambda led: accept(led, ref(epoch=2)), ref(epoch=1)),
        (Reason.ALREADY_EXISTS, lambda led: accept(led, ref(), attempts=7), ref()),
        (Reason.QUOTA_EXHAUSTED, lambda led: accept(led, ref("other")), ref()),
    ],
)
async def test_assignments_that_are_refused(
    ledger: Ledger,
    reason: Reason,
    prepare: Callable[[Ledger], object],
    group: GroupRef,
) -> None:
    await prepare(ledger)  # type: ignore[misc]
    with pytest.raises(ServiceError) as caught:
        await accept(ledger, group, credits_=1)
    assert caught.value.reason is reason


@pytest.mark.parametrize("committed", [True, False])
async def test_a_group_that_was_given_up_or_committed_is_not_taken_up_again(
    ledger: Ledger, committed: bool
) -> None:
    await accept(ledger, ref())
    await ledger.withdraw(ref())
    if committed:
        await ledger.commit(ref(), Decision.WITHDRAWN, 0)
    with pytest.raises(ServiceError) as caught:
        await accept(ledger, ref())
    assert caught.value.reason is Reason.ALREADY_EXISTS


async def test_a_later_epoch_takes_the_place_of_an_earlier_one_and_of_its_credit(
    ledger: Ledger,
) -> None:
    await accept(ledger, ref(epoch=0), credits_=1)
    acceptance = await accept(ledger, ref(epoch=1), credits_=1)
    assert acceptance.superseded == (ref(epoch=0),)
    assert not await ledger.end_try(ended(ref(epoch=0)))
    assert await ledger.finish_group(ref(epoch=0)) is None
    await finish(ledger, ref(epoch=1))
    delivery = await ledger.deliverable(ME, 0)
    assert isinstance(delivery, Delivery)
    assert delivery.key.epoch == 1
    assert await deliveries(ledger, after=delivery.cursor) == []


async def test_a_received_group_needs_no_credit(ledger: Ledger) -> None:
    await accept(ledger, ref("a"), credits_=1)
    await ledger.received(ME, await finish(ledger, ref("a")))
    assert (await accept(ledger, ref("b"), credits_=1)).new


async def test_consumers_do_not_see_each_other(ledger: Ledger) -> None:
    await ledger.hello("evaluator", Purpose.EVALUATION, 1, 0)
    await accept(ledger, ref("a"))
    await accept(ledger, ref("a", consumer="evaluator"), credits_=1)
    await finish(ledger, ref("a", consumer="evaluator"))
    assert await deliveries(ledger) == []
    assert isinstance(await ledger.deliverable("evaluator", 0), Delivery)


async def test_a_withdrawn_group_stays_known_until_it_is_committed(ledger: Ledger) -> None:
    await accept(ledger, ref())
    await finish(ledger, ref())
    await ledger.withdraw(ref())
    assert await deliveries(ledger) == []
    assert await hello(ledger) == {"g": "WITHDRAWN"}
    await ledger.commit(ref(), Decision.WITHDRAWN, 0)
    assert await hello(ledger) == {}


async def test_forget_drops_all_groups_but_those_to_keep(ledger: Ledger) -> None:
    for name in "abc":
        await accept(ledger, ref(name))
    await finish(ledger, ref("b"))
    running = await ledger.forget(ME, [ref("a").key])
    assert running == [ref("c")]
    assert await hello(ledger) == {"a": "RUNNING"}
    assert (await accept(ledger, ref("b"))).new


async def test_commit_is_repeatable_and_unknown_groups_are_fine(ledger: Ledger) -> None:
    await accept(ledger, ref())
    await finish(ledger, ref())
    for _ in range(2):
        await ledger.commit(ref(), Decision.TRAINED, 7)
    await ledger.commit(ref("never seen"), Decision.STALE, 0)
    assert await ledger.counts() == {GroupStanding.COMMITTED: 1}


async def test_array_files_go_once_everything_in_them_is_committed(tmp_path: Path) -> None:
    ledger = await open_ledger(tmp_path, file_bytes=200)
    await hello(ledger)
    groups = [ref(f"g{i}") for i in range(6)]
    for group in groups:
        await accept(ledger, group)
        await ledger.end_try(ended(group, payload=b"x" * 150))
        await ledger.finish_group(group)
    assert len(list((tmp_path / "arrays").iterdir())) >= 3
    for group in groups:
        await ledger.commit(group, Decision.TRAINED, 1)
    assert [path.stat().st_size for path in (tmp_path / "arrays").iterdir()] == [0]
    await accept(ledger, ref("after"))
    await finish(ledger, ref("after"))
    assert await deliveries(ledger) == ["after"]
    await ledger.close()


async def test_old_committed_rows_are_pruned(tmp_path: Path) -> None:
    ledger = await open_ledger(tmp_path, keep_committed=3)
    await hello(ledger)
    for i in range(256):
        await accept(ledger, ref(f"g{i}"))
        await ledger.commit(ref(f"g{i}"), Decision.STALE, 0)
    assert await ledger.counts() == {GroupStanding.COMMITTED: 3}
    await ledger.close()


async def test_many_finished_attempts_share_a_commit(ledger: Ledger) -> None:
    await accept(ledger, ref(), attempts=200)
    before = ledger.commits
    await asyncio.gather(*(ledger.end_try(ended(ref(), i)) for i in range(200)))
    assert ledger.commits - before <= 20


async def test_a_refused_step_undoes_nothing_of_its_batch(ledger: Ledger) -> None:
    results = await asyncio.gather(
        accept(ledger, ref("a"), credits_=1),
        accept(ledger, ref("b"), credits_=1),
        ledger.hello("other", Purpose.EVALUATION, 1, 0),
        return_exceptions=True,
    )
    assert isinstance(results[0], Acceptance)
    assert isinstance(results[1], ServiceError)
    assert await hello(ledger) == {"a": "RUNNING"}


async def test_progress_of_a_running_try_costs_no_commit_of_its_own(ledger: Ledger) -> None:
    await accept(ledger, ref())
    before = ledger.commits
    for turn in range(50):
        ledger.lease(ref(), 0, 0, turn, 10 * turn)
    assert ledger.commits == before
    await finish(ledger, ref())
    assert ledger.commits == before + 2  # the attempt, the group


async def test_reopening_goes_on_with_what_ran_and_keeps_what_was_finished(
    tmp_path: Path,
) -> None:
    ledger = await open_ledger(tmp_path)
    await hello(ledger)
    await accept(ledger, ref(), attempts=3)
    await ledger.end_try(ended(ref(), 0))
    await ledger.end_try(faulted(ref(), 1))
    ledger.lease(ref(), 1, 1, 0, 0)
    ledger.lease(ref(), 2, 0, 4, 40)
    await ledger.close()
    ledger = await open_ledger(tmp_path)
    (group,) = ledger.recovery.groups
    assert group.assignment == b"assignment"
    assert {i: (s.status, s.try_number, s.faults) for i, s in group.slots.items()} == {
        0: (SlotStatus.VALID, 0, 0),
        1: (SlotStatus.PENDING, 2, 1),
        2: (SlotStatus.PENDING, 1, 0),
    }
    assert (ledger.boot, ledger.recovery.cut_off_tries) == (2, 2)
    for index, try_number in ((1, 2), (2, 1)):
        await ledger.end_try(ended(ref(), index, try_number))
    await ledger.finish_group(ref())
    delivery = await ledger.deliverable(ME, 0)
    assert isinstance(delivery, Delivery)
    assert [a.index for a in delivery.attempts] == [0, 1, 2]
    causes = sorted(f.fault.cause for f in delivery.faulted_tries)
    assert causes == [FaultCause.RESTART, FaultCause.RESTART, FaultCause.SANDBOX]
    await ledger.close()


async def test_a_given_up_attempt_stays_given_up(tmp_path: Path) -> None:
    ledger = await open_ledger(tmp_path)
    await hello(ledger)
    await accept(ledger, ref(), attempts=2)
    last = ended(ref(), 0, outcome=Outcome.FAULT, fault=FAULT, counted=True)
    await ledger.end_try(last)
    await ledger.close()
    ledger = await open_ledger(tmp_path)
    assert ledger.recovery.groups[0].slots[0].status is SlotStatus.GIVEN_UP
    await ledger.end_try(ended(ref(), 1))
    await ledger.finish_group(ref(), FAULT)
    delivery = await ledger.deliverable(ME, 0)
    assert isinstance(delivery, Delivery)
    assert delivery.quarantined == FAULT
    assert await ledger.quarantined_tasks() == ["t"]
    await ledger.close()


def arrays_file(folder: Path) -> Path:
    return next((folder / "arrays").iterdir())


@pytest.mark.parametrize("damage", ["cut", "flip", "delete"])
async def test_an_attempt_whose_bytes_are_damaged_is_made_again(
    tmp_path: Path, damage: str
) -> None:
    ledger = await open_ledger(tmp_path)
    await hello(ledger)
    await accept(ledger, ref(), attempts=2)
    await finish(ledger, ref(), attempts=2)
    await ledger.close()
    path = arrays_file(tmp_path)
    data = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "flip":
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()
    ledger = await open_ledger(tmp_path)
    assert ledger.recovery.damaged_attempts == (2 if damage == "delete" else 1)
    assert await ledger.deliverable(ME, 0) is None
    slots = ledger.recovery.groups[0].slots
    assert slots[1].status is SlotStatus.PENDING
    assert slots[1].faults == 0
    for index, slot in slots.items():
        if slot.status is SlotStatus.PENDING:
            await ledger.end_try(ended(ref(), index, slot.try_number))
    await ledger.finish_group(ref())
    assert await deliveries(ledger) == ["g"]
    await ledger.close()


async def test_damage_that_appears_later_is_noticed_at_delivery_and_mended(
    tmp_path: Path,
) -> None:
    ledger = await open_ledger(tmp_path)
    await hello(ledger)
    await accept(ledger, ref())
    await finish(ledger, ref())
    path = arrays_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    resumed = await ledger.deliverable(ME, 0)
    assert isinstance(resumed, ResumedGroup)
    assert resumed.slots[0].status is SlotStatus.PENDING
    await ledger.end_try(ended(ref(), 0, resumed.slots[0].try_number))
    await ledger.finish_group(ref())
    assert await deliveries(ledger) == ["g"]
    await ledger.close()


async def test_a_torn_tail_is_cut_off(tmp_path: Path) -> None:
    ledger = await open_ledger(tmp_path)
    await hello(ledger)
    await accept(ledger, ref())
    await finish(ledger, ref())
    await ledger.close()
    path = arrays_file(tmp_path)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"TRA1 half a record")
    ledger = await open_ledger(tmp_path)
    assert ledger.recovery.cut_bytes == 18
    assert path.stat().st_size == size
    assert await deliveries(ledger) == ["g"]
    await ledger.close()


async def test_a_full_disk_fails_the_step_and_takes_nothing_down(tmp_path: Path) -> None:
    full = False

    def probe(point: str) -> None:
        if full and point == "written":
            raise OSError(errno.ENOSPC, "No space left on device")

    ledger = await open_ledger(tmp_path, probe=probe)
    await hello(ledger)
    await accept(ledger, ref())
    full = True
    with pytest.raises(LedgerDiskFullError, match="nothing finished is lost"):
        await ledger.end_try(ended(ref()))
    assert arrays_file(tmp_path).stat().st_size == 0
    full = False
    await finish(ledger, ref())
    assert await deliveries(ledger) == ["g"]
    await ledger.close()


async def test_a_database_that_cannot_grow_is_a_full_disk(tmp_path: Path) -> None:
    ledger = await open_ledger(tmp_path)
    await hello(ledger)
    pages = await ledger._step(lambda db: db.sql.execute("PRAGMA max_page_count = 1").fetchone()[0])
    names = [f"{'g' * 200}{i}" for i in range(500)]
    results = await asyncio.gather(
        *(accept(ledger, ref(name), credits_=10_000) for name in names), return_exceptions=True
    )
    assert {type(result) for result in results} <= {Acceptance, LedgerDiskFullError}
    assert isinstance(results[-1], LedgerDiskFullError)
    await ledger._step(lambda db: db.sql.execute("PRAGMA max_page_count = 1000000").fetchone())
    await accept(ledger, ref("after"), credits_=10_000)
    assert pages > 0
    await ledger.close()


async def test_two_engines_cannot_share_a_ledger(tmp_path: Path) -> None:
    ledger = await open_ledger(tmp_path)
    with pytest.raises(LedgerUnusableError, match="open in another process"):
        await open_ledger(tmp_path)
    await ledger.close()
    await (await open_ledger(tmp_path)).close()


async def test_a_ledger_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    await (await open_ledger(tmp_path)).close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as sql:
        sql.execute("PRAGMA user_version = 99")
    sql.close()
    with pytest.raises(LedgerUnusableError, match="schema version 99"):
        await open_ledger(tmp_path)


async def test_a_file_that_is_no_database_is_an_error_of_the_ledger(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(LedgerError, match="not a database"):
        await open_ledger(tmp_path)


async def test_a_bug_in_the_writer_fails_everybody_who_waits(tmp_path: Path) -> None:
    def probe(point: str) -> None:
        if broken and point == "synced":
            raise RuntimeError("bug")

    broken = False
    ledger = await open_ledger(tmp_path, probe=probe)
    await hello(ledger)
    broken = True
    with pytest.raises(LedgerError, match="writer died: RuntimeError"):
        await accept(ledger, ref())
    with pytest.raises(LedgerError, match="closed"):
        await accept(ledger, ref())
    await ledger.close()


async def test_arrays_are_synced_before_the_row_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real = os.fdatasync
    ledger = await open_ledger(tmp_path, probe=events.append)
    await hello(ledger)
    await accept(ledger, ref())
    events.clear()

    def fdatasync(descriptor: int) -> None:
        events.append("fdatasync")
        real(descriptor)

    monkeypatch.setattr("os.fdatasync", fdatasync)
    await finish(ledger, ref())
    assert events[:4] == ["written", "fdatasync", "synced", "committed"]
    await ledger.close()
