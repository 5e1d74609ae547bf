"""The ledger for coroutines: one writer thread, many finished attempts per sync of the disk.

A step is handed to the thread and awaited; it is durable when the await returns. All steps that
have gathered since the last commit share one transaction, one sync of the array file and one of the
database. `lease` alone is not awaited: how far an attempt has come is written along with whatever
comes next, within a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from rollout_engine.errors import LedgerError
from rollout_engine.ledger import reads
from rollout_engine.ledger.database import Database
from rollout_engine.ledger.opening import OpenedLedger, open_ledger, translated
from rollout_engine.ledger.rows import (
    Acceptance,
    Delivery,
    EndedTry,
    GroupRef,
    Reconnection,
    ResumedGroup,
)
from rollout_engine.types import Decision, Fault, GroupKey, Purpose

logger = logging.getLogger(__name__)
T = TypeVar("T")

_MAX_BATCH = 256
_LEASE_FLUSH_S = 1.0


@dataclass(frozen=True, slots=True)
class _Step:
    run: Callable[[Database], Any]
    done: asyncio.Future[Any]


_Result = tuple[asyncio.Future[Any], Any, Exception | None]


@dataclass(frozen=True, slots=True)
class _Lease:
    ref: GroupRef
    index: int
    try_number: int
    turns: int
    tokens: int
    at_s: float


class Ledger:
    """The durable record of every group and attempt of one engine. Make it with `open`.

    Attributes:
        ledger_id: Of this ledger, made once.
        boot: How often it has been opened, this time included.
        recovery: What opening it found.
    """

    def __init__(
        self,
        opened: OpenedLedger,
        wall_clock: Callable[[], float],
        probe: Callable[[str], None],
    ) -> None:
        self.ledger_id = opened.ledger_id
        self.boot = opened.boot
        self.recovery = opened.recovery
        self._folder = opened.folder
        self._lock_file = opened.lock_file
        self._sql = opened.sql
        self._arrays = opened.arrays
        self._database = opened.database
        self._wall_clock = wall_clock
        self._probe = probe
        self._steps: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._leases: dict[tuple[GroupRef, int, int], _Lease] = {}
        self._leases_lock = threading.Lock()
        self._commits = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write, name="ledger", daemon=True)
        self._thread.start()

    @classmethod
    async def open(
        cls,
        folder: Path,
        *,
        file_bytes: int = 64 * 1024 * 1024,
        keep_committed: int = 10_000,
        wall_clock: Callable[[], float] = time.time,
        probe: Callable[[str], None] = lambda point: None,
    ) -> Self:
        """Open or make the ledger of a folder, and recover it.

        Args:
            folder: Holds the database and the arrays; made if it does not exist.
            file_bytes: Size at which an array file is closed.
            keep_committed: Committed groups remembered, to refuse late assignments of them.
            wall_clock: Unix seconds.
            probe: Called at named points of a commit, for tests that kill the process there.

        Raises:
            LedgerUnusableError: Another engine has it open, or its version is unknown.
            LedgerDiskFullError: The disk is full.

        """
        opened = await asyncio.to_thread(
            open_ledger, folder, file_bytes, keep_committed, wall_clock()
        )
        return cls(opened, wall_clock, probe)

    @property
    def commits(self) -> int:
        """Transactions since it was opened."""
        return self._commits

    async def hello(
        self, consumer_id: str, purpose: Purpose, incarnation: int, cursor: int
    ) -> Reconnection:
        """Open or resume a consumer; see `Database.hello`."""
        return await self._step(lambda db: db.hello(consumer_id, purpose, incarnation, cursor))

    async def accept(
        self, ref: GroupRef, *, task_id: str, attempts: int, assignment: bytes, credits_: int
    ) -> Acceptance:
        """Take up a group, unless it is known; see `Database.accept`."""
        now_s = self._wall_clock()
        return await self._step(
            lambda db: db.accept(
                ref,
                task_id=task_id,
                attempts=attempts,
                assignment=assignment,
                credits_=credits_,
                now_s=now_s,
            )
        )

    def lease(self, ref: GroupRef, index: int, try_number: int, turns: int, tokens: int) -> None:
        """Note that a try runs and how far it has come; written soon, not now."""
        lease = _Lease(ref, index, try_number, turns, tokens, self._wall_clock())
        with self._leases_lock:
            self._leases[ref, index, try_number] = lease

    async def end_try(self, ended: EndedTry) -> bool:
        """Record an ended try, with its arrays; whether its group is still running.

        Raises:
            LedgerDiskFullError: Nothing was written; the caller still holds the attempt and has to
                try again.

        """
        with self._leases_lock:
            self._leases.pop((ended.ref, ended.index, ended.try_number), None)
        return await self._step(lambda db: db.end_try(ended))

    async def finish_group(self, ref: GroupRef, quarantined: Fault | None = None) -> int | None:
        """Make a running group FINISHED; see `Database.finish_group`."""
        return await self._step(lambda db: db.finish_group(ref, quarantined))

    async def deliverable(
        self, consumer_id: str, after_cursor: int
    ) -> Delivery | ResumedGroup | None:
        """Read the first finished group after a cursor; see `Database.deliverable`."""
        return await self._step(lambda db: db.deliverable(consumer_id, after_cursor))

    async def received(self, consumer_id: str, cursor: int) -> None:
        """Note that the consumer holds every group up to a cursor."""
        await self._step(lambda db: db.received(consumer_id, cursor))

    async def commit(self, ref: GroupRef, decision: Decision, step: int) -> None:
        """Record what became of a group and drop its arrays."""
        await self._step(lambda db: db.commit(ref, decision, step))

    async def withdraw(self, ref: GroupRef) -> None:
        """Give a group up and drop its arrays."""
        await self._step(lambda db: db.withdraw(ref))

    async def forget(self, consumer_id: str, keep: Collection[GroupKey]) -> list[GroupRef]:
        """Delete every group of the consumer but some; which of them were running."""
        return await self._step(lambda db: db.forget(consumer_id, keep))

    async def counts(self) -> dict[str, int]:
        """Count groups by standing."""
        return await self._step(lambda db: reads.counts(db.sql))

    async def quarantined_tasks(self) -> list[str]:
        """Name the tasks with a quarantined group."""
        return await self._step(lambda db: reads.quarantined_tasks(db.sql))

    async def close(self) -> None:
        """Write what is left, and close. Repeatable."""
        if not self._closed.is_set():
            self._closed.set()
            self._steps.put(None)
            await asyncio.to_thread(self._thread.join)

    async def _step(self, run: Callable[[Database], T]) -> T:
        if self._closed.is_set():
            raise LedgerError(f"the ledger {self._folder} is closed")
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._steps.put(_Step(run, done))
        if self._closed.is_set():
            # The writer has died since the check, and may have missed this step.
            self._fail_all([], LedgerError(f"the ledger {self._folder} is closed"))
        # A caller that is cancelled leaves the step in the queue: it is written all the same.
        return await done

    # From here on everything runs in the writer thread.

    def _write(self) -> None:
        batch: list[_Step] = []
        try:
            open_ = True
            while open_:
                batch = []
                with contextlib.suppress(queue.Empty):
                    open_ = self._gather(self._steps.get(timeout=_LEASE_FLUSH_S), batch)
                with self._leases_lock:
                    leases, self._leases = list(self._leases.values()), {}
                if batch or leases:
                    self._commit_batch(batch, leases)
        except BaseException as error:
            # A bug. Whoever waits must not wait for ever, and nothing may be written any more.
            logger.critical("the ledger's writer died", exc_info=True)
            self._fail_all(batch, LedgerError(f"the ledger's writer died: {error!r}"))
        finally:
            self._arrays.close()
            self._sql.close()
            os.close(self._lock_file)

    def _fail_all(self, batch: list[_Step], error: LedgerError) -> None:
        self._closed.set()
        while not self._steps.empty():
            self._gather(self._steps.get_nowait(), batch)
        _resolve([(step.done, None, error) for step in batch])

    def _gather(self, first: _Step | None, batch: list[_Step]) -> bool:
        """Take what waits into the batch; False when the ledger is to be closed."""
        step = first
        while step is not None:
            batch.append(step)
            if len(batch) >= _MAX_BATCH:
                return True
            try:
                step = self._steps.get_nowait()
            except queue.Empty:
                return True
        return False

    def _commit_batch(self, batch: list[_Step], leases: list[_Lease]) -> None:
        position = self._arrays.position
        self._database.emptied.clear()
        results: list[_Result] = []
        try:
            # How far attempts have come needs no sync of its own.
            self._sql.execute(f"PRAGMA synchronous = {'FULL' if batch else 'NORMAL'}")
            self._sql.execute("BEGIN IMMEDIATE")
            for lease in leases:
                self._database.lease(
                    lease.ref,
                    lease.index,
                    lease.try_number,
                    lease.turns,
                    lease.tokens,
                    lease.at_s,
                )
            results = [self._run_step(step) for step in batch]
            self._probe("written")
            self._arrays.sync()
            self._probe("synced")
            self._sql.execute("COMMIT")
            self._probe("committed")
        except (sqlite3.Error, OSError) as error:
            failure = translated(error, self._folder)
            logger.error("%d steps of the ledger failed: %s", len(batch), failure)  # noqa: TRY400
            self._undo(position)
            results = [(step.done, None, failure) for step in batch]
        else:
            self._commits += 1
            self._delete_empty(self._database.emptied)
        self._probe("pruned")
        _resolve(results)

    def _run_step(self, step: _Step) -> _Result:
        """Run one step so that its failure undoes nothing of the others."""
        position = self._arrays.position
        self._sql.execute("SAVEPOINT step")
        try:
            result = step.run(self._database)
        except Exception as error:
            if not self._sql.in_transaction:
                raise  # SQLite has rolled everything back, as it does on a full disk
            self._sql.execute("ROLLBACK TO step")
            self._sql.execute("RELEASE step")
            self._arrays.rollback(position)
            return step.done, None, translated(error, self._folder)
        self._sql.execute("RELEASE step")
        return step.done, result, None

    def _undo(self, position: tuple[int, int]) -> None:
        try:
            if self._sql.in_transaction:
                self._sql.execute("ROLLBACK")
            self._arrays.rollback(position)
        except (sqlite3.Error, OSError):
            # The transaction is gone anyway, and a tail without rows is cut at the next opening.
            logger.exception("undoing a failed commit of the ledger failed as well")

    def _delete_empty(self, files: Collection[int]) -> None:
        for number in files:
            if not self._database.has_records(number):
                self._arrays.delete(number)


def _resolve(results: list[_Result]) -> None:
    def settle() -> None:
        for future, result, error in results:
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

    if results:
        try:
            results[0][0].get_loop().call_soon_threadsafe(settle)
        except RuntimeError:
            logger.warning("%d steps of the ledger ended after their event loop", len(results))


__all__ = ["Ledger"]
