"""The ledger's transactions in SQL: each method is one step, run by the one writer thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from service_kit.errors import Reason, service_error

from rollout_engine.errors import LedgerCorruptError
from rollout_engine.ledger import reads
from rollout_engine.ledger.arrays import ArrayFiles
from rollout_engine.ledger.reads import fault_columns
from rollout_engine.ledger.recovery import take_back_damaged
from rollout_engine.ledger.rows import (
    Acceptance,
    Delivery,
    EndedTry,
    GroupRef,
    GroupStanding,
    Reconnection,
    ResumedGroup,
)
from rollout_engine.types import (
    Decision,
    Fault,
    GroupKey,
    Purpose,
)

_PRUNE_EVERY = 256


class Database:
    """Steps of groups and tries. Every method runs inside a transaction of the caller.

    Attributes:
        sql, arrays: For `reads`.
        emptied: Array files from which something was dropped; those without records may go once the
            transaction is committed.
    """

    def __init__(
        self, connection: sqlite3.Connection, arrays: ArrayFiles, keep_committed: int = 10_000
    ) -> None:
        self.sql = connection
        self.arrays = arrays
        self._keep_committed = keep_committed
        self._commits = 0
        self.emptied: set[int] = set()

    def meta(self, key: str) -> str:
        """Read a value of the ledger itself."""
        value: str = self.sql.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0]
        return value

    def hello(
        self, consumer_id: str, purpose: Purpose, incarnation: int, cursor: int
    ) -> Reconnection:
        """Open or resume a consumer.

        Raises:
            ServiceError: `FENCED`, or `CURSOR_EXPIRED` for a cursor that this ledger never gave.

        """
        row = self.sql.execute(
            "SELECT incarnation, newest_cursor FROM consumers WHERE consumer_id = ?",
            (consumer_id,),
        ).fetchone()
        known_incarnation, newest = row or (incarnation, int(self.meta("cursor_base")))
        if incarnation < known_incarnation:
            raise service_error(
                Reason.FENCED,
                f"consumer {consumer_id!r} said Hello as incarnation {incarnation}, but "
                f"{known_incarnation} has taken over; this one must stop",
                metadata={"have": str(known_incarnation), "got": str(incarnation)},
            )
        if cursor > newest:
            raise service_error(
                Reason.CURSOR_EXPIRED,
                f"consumer {consumer_id!r} resumes at cursor {cursor}, but the newest of this "
                f"ledger is {newest}: the ledger was replaced; resume at cursor 0",
                metadata={"newest_cursor": str(newest)},
            )
        self.sql.execute(
            "INSERT INTO consumers VALUES (?, ?, ?, ?) ON CONFLICT (consumer_id) DO UPDATE"
            " SET purpose = excluded.purpose, incarnation = excluded.incarnation",
            (consumer_id, purpose.value, incarnation, newest),
        )
        self.sql.execute(
            "UPDATE groups SET state = ? WHERE consumer_id = ? AND state = ? AND cursor > ?",
            (GroupStanding.FINISHED, consumer_id, GroupStanding.RECEIVED, cursor),
        )
        self.received(consumer_id, cursor)
        return Reconnection(newest, tuple(reads.known_groups(self.sql, consumer_id)))

    def accept(
        self,
        ref: GroupRef,
        *,
        task_id: str,
        attempts: int,
        assignment: bytes,
        credits_: int,
        now_s: float,
    ) -> Acceptance:
        """Take up a group, unless it is known.

        Raises:
            ServiceError: `STALE_EPOCH`, `ALREADY_EXISTS` (another task or size under this key, or
                committed), or `QUOTA_EXHAUSTED`.

        """
        rows = self.sql.execute(
            "SELECT group_row, epoch, state, task_id, attempts FROM groups"
            " WHERE consumer_id = ? AND group_id = ? ORDER BY epoch DESC",
            (ref.consumer_id, ref.key.group_id),
        ).fetchall()
        if rows and rows[0][1] > ref.key.epoch:
            raise service_error(
                Reason.STALE_EPOCH,
                f"group {ref.key} was assigned again under epoch {rows[0][1]}",
                metadata={"epoch": str(rows[0][1])},
            )
        if rows and rows[0][1] == ref.key.epoch:
            sequence, _, state, known_task, known_attempts = rows[0]
            if (known_task, known_attempts) != (task_id, attempts):
                raise service_error(
                    Reason.ALREADY_EXISTS,
                    f"group {ref.key} is known with {known_attempts} attempts at {known_task!r}; "
                    f"this asks for {attempts} at {task_id!r}: use another group id",
                )
            return self._accept_again(ref, GroupStanding(state), sequence)
        in_use = self.sql.execute(
            "SELECT count(*) FROM groups WHERE consumer_id = ? AND state IN (?, ?)",
            (ref.consumer_id, GroupStanding.RUNNING, GroupStanding.FINISHED),
        ).fetchone()[0]
        superseded = [
            GroupRef(ref.consumer_id, GroupKey(ref.key.group_id, row[1]))
            for row in rows
            if row[2] not in (GroupStanding.COMMITTED, GroupStanding.WITHDRAWN)
        ]
        if in_use - len(superseded) >= credits_:
            raise service_error(
                Reason.QUOTA_EXHAUSTED,
                f"consumer {ref.consumer_id!r} has {in_use} groups assigned and not received, "
                f"which is all its {credits_} credits",
            )
        for old in superseded:
            self.withdraw(old)
        inserted = self.sql.execute(
            "INSERT INTO groups (consumer_id, group_id, epoch, state, task_id, attempts,"
            " assignment, accepted_at_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                ref.consumer_id,
                ref.key.group_id,
                ref.key.epoch,
                GroupStanding.RUNNING,
                task_id,
                attempts,
                assignment,
                now_s,
            ),
        )
        assert inserted.lastrowid is not None
        return Acceptance(
            new=True,
            redelivered=False,
            sequence=inserted.lastrowid,
            superseded=tuple(superseded),
        )

    def _accept_again(self, ref: GroupRef, state: GroupStanding, sequence: int) -> Acceptance:
        if state in (GroupStanding.COMMITTED, GroupStanding.WITHDRAWN):
            raise service_error(
                Reason.ALREADY_EXISTS,
                f"group {ref.key} is {state}: it is not delivered again; assign it under the "
                "next epoch",
                metadata={"state": state.value},
            )
        again = state is GroupStanding.RECEIVED
        if again:
            self.sql.execute(
                "UPDATE groups SET state = ?, cursor = ? WHERE group_row = ?",
                (GroupStanding.FINISHED, self._next_cursor(ref.consumer_id), sequence),
            )
        return Acceptance(new=False, redelivered=again, sequence=sequence)

    def lease(
        self, ref: GroupRef, index: int, try_number: int, turns: int, tokens: int, now_s: float
    ) -> None:
        """Record that a try runs, and how far it has come."""
        row = self._running_row(ref)
        if row is not None:
            self.sql.execute(
                "INSERT INTO tries (group_row, attempt, try, leased_at_s, turns, tokens)"
                " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (group_row, attempt, try) DO UPDATE"
                " SET turns = excluded.turns, tokens = excluded.tokens WHERE outcome IS NULL",
                (row, index, try_number, now_s, turns, tokens),
            )

    def end_try(self, ended: EndedTry) -> bool:
        """Record an ended try, with its arrays; whether its group is still running."""
        row = self._running_row(ended.ref)
        if row is None:
            return False
        location = None if ended.payload is None else self.arrays.append(ended.payload)
        where = (
            (None,) * 4
            if location is None
            else (
                location.file,
                location.offset,
                location.length,
                location.checksum.to_bytes(8, "little"),
            )
        )
        self.lease(
            ended.ref,
            ended.index,
            ended.try_number,
            ended.turns,
            ended.tokens,
            ended.ended_at_s,
        )
        self.sql.execute(
            "UPDATE tries SET outcome = ?, final = ?, counted = ?, fault_stage = ?,"
            " fault_cause = ?, fault_message = ?, ended_at_s = ?, file = ?, offset = ?,"
            " length = ?, checksum = ?"
            " WHERE group_row = ? AND attempt = ? AND try = ?",
            (
                ended.outcome,
                ended.final,
                ended.counted,
                *fault_columns(ended.fault),
                ended.ended_at_s,
                *where,
                row,
                ended.index,
                ended.try_number,
            ),
        )
        return True

    def finish_group(self, ref: GroupRef, quarantined: Fault | None) -> int | None:
        """Make a running group FINISHED once all its attempts are recorded.

        Returns:
            Its cursor; None if it is not running any more.

        """
        row = self._running_row(ref)
        if row is None:
            return None
        cursor = self._next_cursor(ref.consumer_id)
        self.sql.execute(
            "UPDATE groups SET state = ?, cursor = ?, fault_stage = ?, fault_cause = ?,"
            " fault_message = ? WHERE group_row = ?",
            (GroupStanding.FINISHED, cursor, *fault_columns(quarantined), row),
        )
        return cursor

    def deliverable(self, consumer_id: str, after_cursor: int) -> Delivery | ResumedGroup | None:
        """Read the first finished group after a cursor, if there is one.

        Returns:
            The group. If its arrays turn out to be damaged, what was damaged is taken back and the
            group is given to be run again.

        """
        row = reads.first_finished(self.sql, consumer_id, after_cursor)
        if row is None:
            return None
        try:
            return reads.delivery(self.sql, self.arrays, row)
        except LedgerCorruptError:
            take_back_damaged(self.sql, self.arrays, row)
            return next(g for g in reads.running_groups(self.sql) if g.sequence == row)

    def received(self, consumer_id: str, cursor: int) -> None:
        """Note that the consumer holds every group up to a cursor."""
        self.sql.execute(
            "UPDATE groups SET state = ? WHERE consumer_id = ? AND state = ? AND cursor <= ?",
            (GroupStanding.RECEIVED, consumer_id, GroupStanding.FINISHED, cursor),
        )

    def commit(self, ref: GroupRef, decision: Decision, step: int) -> None:
        """Record what became of a group and drop its arrays. Unknown groups are fine."""
        row = self._row(ref)
        if row is not None:
            self._drop_tries(row)
            self.sql.execute(
                "UPDATE groups SET state = ?, decision = ?, step = ?, assignment = x''"
                " WHERE group_row = ?",
                (GroupStanding.COMMITTED, decision, step, row),
            )
            self._commits += 1
            if self._commits % _PRUNE_EVERY == 0:
                self._prune()

    def withdraw(self, ref: GroupRef) -> None:
        """Give a group up and drop its arrays; the row stays until it is committed."""
        row = self._row(ref)
        if row is not None:
            self._drop_tries(row)
            self.sql.execute(
                "UPDATE groups SET state = ? WHERE group_row = ? AND state != ?",
                (GroupStanding.WITHDRAWN, row, GroupStanding.COMMITTED),
            )

    def forget(self, consumer_id: str, keep: Iterable[GroupKey]) -> list[GroupRef]:
        """Delete every group of the consumer but some; which of them were running."""
        kept = set(keep)
        running: list[GroupRef] = []
        for row, group_id, epoch, state in self.sql.execute(
            "SELECT group_row, group_id, epoch, state FROM groups WHERE consumer_id = ?",
            (consumer_id,),
        ).fetchall():
            key = GroupKey(group_id, epoch)
            if key in kept:
                continue
            if state == GroupStanding.RUNNING:
                running.append(GroupRef(consumer_id, key))
            self._drop_tries(row)
            self.sql.execute("DELETE FROM groups WHERE group_row = ?", (row,))
        return running

    def has_records(self, file: int) -> bool:
        """Whether any row names a record of an array file."""
        found = self.sql.execute("SELECT 1 FROM tries WHERE file = ? LIMIT 1", (file,)).fetchone()
        return found is not None

    def _prune(self) -> None:
        self.sql.execute(
            "DELETE FROM groups WHERE state = ? AND group_row <= (SELECT group_row FROM groups"
            " WHERE state = ? ORDER BY group_row DESC LIMIT 1 OFFSET ?)",
            (GroupStanding.COMMITTED, GroupStanding.COMMITTED, self._keep_committed),
        )

    def _row(self, ref: GroupRef) -> int | None:
        found = self.sql.execute(
            "SELECT group_row FROM groups WHERE consumer_id = ? AND group_id = ? AND epoch = ?",
            (ref.consumer_id, ref.key.group_id, ref.key.epoch),
        ).fetchone()
        return None if found is None else int(found[0])

    def _running_row(self, ref: GroupRef) -> int | None:
        found = self.sql.execute(
            "SELECT group_row FROM groups WHERE consumer_id = ? AND group_id = ? AND epoch = ?"
            " AND state = ?",
            (ref.consumer_id, ref.key.group_id, ref.key.epoch, GroupStanding.RUNNING),
        ).fetchone()
        return None if found is None else int(found[0])

    def _next_cursor(self, consumer_id: str) -> int:
        cursor: int = self.sql.execute(
            "UPDATE consumers SET newest_cursor = newest_cursor + 1 WHERE consumer_id = ?"
            " RETURNING newest_cursor",
            (consumer_id,),
        ).fetchone()[0]
        return cursor

    def _drop_tries(self, row: int) -> None:
        files = self.sql.execute(
            "SELECT DISTINCT file FROM tries WHERE group_row = ? AND file IS NOT NULL", (row,)
        )
        self.emptied.update(found[0] for found in files.fetchall())
        self.sql.execute("DELETE FROM tries WHERE group_row = ?", (row,))


__all__ = ["Database"]
