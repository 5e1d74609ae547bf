"""What the ledger is asked for, in SQL."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from rollout_engine.core.group import Slot, SlotStatus
from rollout_engine.ledger.arrays import ArrayFiles, Location
from rollout_engine.ledger.rows import (
    Delivery,
    GroupRef,
    GroupStanding,
    KnownGroup,
    ResumedGroup,
    StoredAttempt,
)
from rollout_engine.types import (
    AttemptId,
    Fault,
    FaultCause,
    FaultedTry,
    FaultStage,
    GroupKey,
    Outcome,
)


def first_finished(sql: sqlite3.Connection, consumer_id: str, after_cursor: int) -> int | None:
    """Find the row of the first finished group after a cursor."""
    row = sql.execute(
        "SELECT group_row FROM groups WHERE consumer_id = ? AND state = ? AND cursor > ?"
        " ORDER BY cursor LIMIT 1",
        (consumer_id, GroupStanding.FINISHED, after_cursor),
    ).fetchone()
    return None if row is None else int(row[0])


def delivery(sql: sqlite3.Connection, arrays: ArrayFiles, group_row: int) -> Delivery:
    """Read a finished group whole.

    Raises:
        LedgerCorruptError: Its arrays are damaged.

    """
    group_id, epoch, task_id, cursor, *quarantine = sql.execute(
        "SELECT group_id, epoch, task_id, cursor, fault_stage, fault_cause, fault_message"
        " FROM groups WHERE group_row = ?",
        (group_row,),
    ).fetchone()
    key = GroupKey(group_id, epoch)
    attempts: list[StoredAttempt] = []
    faulted: list[FaultedTry] = []
    for found in sql.execute(
        "SELECT attempt, try, tokens, outcome, final, fault_stage, fault_cause, fault_message,"
        " file, offset, length, checksum FROM tries WHERE group_row = ? ORDER BY attempt, try",
        (group_row,),
    ):
        index, try_number, tokens, outcome, final = found[:5]
        if outcome == Outcome.FAULT:
            fault = fault_of_columns(*found[5:8])
            assert fault is not None
            faulted.append(FaultedTry(AttemptId(key, index, try_number), fault, tokens))
        if final:
            location = location_of_columns(*found[8:12])
            attempts.append(StoredAttempt(index, arrays.read(location), location.checksum))
    quarantined = fault_of_columns(quarantine[0], quarantine[1], quarantine[2])
    return Delivery(key, task_id, cursor, tuple(attempts), quarantined, tuple(faulted))


def running_groups(sql: sqlite3.Connection) -> list[ResumedGroup]:
    """Read every running group with what is known of its attempts, oldest first."""
    rows = sql.execute(
        "SELECT group_row, consumer_id, group_id, epoch, assignment FROM groups"
        " WHERE state = ? ORDER BY group_row",
        (GroupStanding.RUNNING,),
    ).fetchall()
    return [
        ResumedGroup(
            ref=GroupRef(consumer_id, GroupKey(group_id, epoch)),
            sequence=row,
            assignment=assignment,
            slots=_slots(sql, row),
        )
        for row, consumer_id, group_id, epoch, assignment in rows
    ]


def known_groups(sql: sqlite3.Connection, consumer_id: str) -> Iterator[KnownGroup]:
    """Read the groups of a consumer that are not committed, in order of acceptance."""
    for group_id, epoch, state, cursor in sql.execute(
        "SELECT group_id, epoch, state, cursor FROM groups WHERE consumer_id = ? AND state != ?"
        " ORDER BY group_row",
        (consumer_id, GroupStanding.COMMITTED),
    ):
        yield KnownGroup(GroupKey(group_id, epoch), GroupStanding(state), cursor or 0)


def counts(sql: sqlite3.Connection) -> dict[str, int]:
    """Count groups by standing."""
    return dict(sql.execute("SELECT state, count(*) FROM groups GROUP BY state"))


def quarantined_tasks(sql: sqlite3.Connection) -> list[str]:
    """Name the tasks with a quarantined group."""
    rows = sql.execute(
        "SELECT DISTINCT task_id FROM groups WHERE fault_cause IS NOT NULL ORDER BY task_id"
    )
    return [row[0] for row in rows]


def fault_of_columns(stage: str | None, cause: str | None, message: str | None) -> Fault | None:
    """Make a fault of its three columns."""
    if stage is None or cause is None:
        return None
    return Fault(FaultStage(stage), FaultCause(cause), message or "")


def fault_columns(fault: Fault | None) -> tuple[str | None, str | None, str | None]:
    """Give a fault's three columns."""
    return (None, None, None) if fault is None else (fault.stage, fault.cause, fault.message)


def location_of_columns(file: int, offset: int, length: int, checksum: bytes) -> Location:
    """Make a location of its four columns."""
    return Location(file, offset, length, int.from_bytes(checksum, "little"))


def _slots(sql: sqlite3.Connection, row: int) -> dict[int, Slot]:
    slots: dict[int, Slot] = {}
    for attempt, try_number, outcome, final, counted, *fault in sql.execute(
        "SELECT attempt, try, outcome, final, counted, fault_stage, fault_cause,"
        " fault_message FROM tries WHERE group_row = ? ORDER BY attempt, try",
        (row,),
    ):
        faults = slots.get(attempt, Slot()).faults + counted
        status = SlotStatus.PENDING
        if final:
            valid = Outcome(outcome).valid
            status = SlotStatus.VALID if valid else SlotStatus.GIVEN_UP
        slots[attempt] = Slot(
            status,
            try_number if final else try_number + 1,
            faults,
            fault_of_columns(fault[0], fault[1], fault[2]),
        )
    return slots


__all__ = [
    "counts",
    "delivery",
    "fault_columns",
    "fault_of_columns",
    "first_finished",
    "known_groups",
    "location_of_columns",
    "quarantined_tasks",
    "running_groups",
]
