"""Opening a ledger after any death: what is whole is kept, what was cut off is made again."""

from __future__ import annotations

import logging
import sqlite3

from rollout_engine.errors import LedgerCorruptError
from rollout_engine.ledger import reads
from rollout_engine.ledger.arrays import ArrayFiles, Location
from rollout_engine.ledger.rows import GroupStanding, Recovery
from rollout_engine.types import Fault, FaultCause, FaultStage, Outcome

logger = logging.getLogger(__name__)

_RESTART = Fault(FaultStage.INTERNAL, FaultCause.RESTART, "the engine ended while it ran")
_DAMAGED = Fault(FaultStage.LEDGER, FaultCause.DISK, "its stored arrays are damaged")


def recover(sql: sqlite3.Connection, arrays: ArrayFiles) -> Recovery:
    """Bring database and array files back to agreement. Repeatable: a death in it does no harm.

    Tails that no row names are cut off. Attempts whose bytes are damaged are taken back, and their
    groups run again, unless the consumer has received them. Tries that ran count as ended by the
    restart, which no cap counts.
    """
    cut_bytes = arrays.cut_tails(_ends(sql))
    sql.execute("BEGIN IMMEDIATE")
    unreceived = sql.execute(
        "SELECT group_row FROM groups WHERE state IN (?, ?)",
        (GroupStanding.RUNNING, GroupStanding.FINISHED),
    ).fetchall()
    damaged = sum(take_back_damaged(sql, arrays, row) for (row,) in unreceived)
    cut_off = cut_off_running(sql)
    sql.execute("UPDATE meta SET value = value + 1 WHERE key = 'boots'")
    sql.execute("COMMIT")
    counts = reads.counts(sql)
    if cut_bytes or cut_off:
        logger.info(
            "recovered the ledger: %d tries were cut off, %d bytes of an unfinished write dropped",
            cut_off,
            cut_bytes,
        )
    return Recovery(
        groups=tuple(reads.running_groups(sql)),
        finished_groups=counts.get(GroupStanding.FINISHED, 0)
        + counts.get(GroupStanding.RECEIVED, 0),
        cut_bytes=cut_bytes,
        cut_off_tries=cut_off,
        damaged_attempts=damaged,
    )


def _ends(sql: sqlite3.Connection) -> dict[int, int]:
    """Find where the last record that a row names ends, by file."""
    # SQLite gives the bare columns of the row that has the maximum.
    rows = sql.execute(
        "SELECT file, max(offset), length FROM tries WHERE file IS NOT NULL GROUP BY file"
    )
    return {file: Location(file, offset, length, 0).end for file, offset, length in rows}


def take_back_damaged(sql: sqlite3.Connection, arrays: ArrayFiles, group_row: int) -> int:
    """Take back the attempts of a group whose arrays are damaged; the group then runs again.

    Returns:
        How many were damaged.

    """
    damaged = 0
    for attempt, try_number, *where in sql.execute(
        "SELECT attempt, try, file, offset, length, checksum FROM tries"
        " WHERE group_row = ? AND file IS NOT NULL",
        (group_row,),
    ).fetchall():
        try:
            arrays.read(reads.location_of_columns(where[0], where[1], where[2], where[3]))
        except LedgerCorruptError as error:
            logger.error("%s; the attempt is made again", error)  # noqa: TRY400 -- says it all
            damaged += 1
            sql.execute(
                "UPDATE tries SET outcome = ?, final = 0, counted = 0, fault_stage = ?,"
                " fault_cause = ?, fault_message = ?, file = NULL, offset = NULL,"
                " length = NULL, checksum = NULL"
                " WHERE group_row = ? AND attempt = ? AND try = ?",
                (Outcome.FAULT, *reads.fault_columns(_DAMAGED), group_row, attempt, try_number),
            )
    if damaged:
        sql.execute(
            "UPDATE groups SET state = ?, cursor = NULL, fault_stage = NULL,"
            " fault_cause = NULL, fault_message = NULL WHERE group_row = ?",
            (GroupStanding.RUNNING, group_row),
        )
    return damaged


def cut_off_running(sql: sqlite3.Connection) -> int:
    """Record that the tries which run have ended with the engine; how many there were."""
    return sql.execute(
        "UPDATE tries SET outcome = ?, fault_stage = ?, fault_cause = ?, fault_message = ?,"
        " ended_at_s = leased_at_s WHERE outcome IS NULL",
        (Outcome.FAULT, *reads.fault_columns(_RESTART)),
    ).rowcount


__all__ = ["cut_off_running", "recover", "take_back_damaged"]
