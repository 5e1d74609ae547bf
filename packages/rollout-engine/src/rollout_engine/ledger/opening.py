"""Opening a ledger's folder: the lock, the database, the arrays, and what a death left behind."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import uuid
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from rollout_engine.errors import LedgerDiskFullError, LedgerError, LedgerUnusableError
from rollout_engine.ledger.arrays import ArrayFiles
from rollout_engine.ledger.database import Database
from rollout_engine.ledger.recovery import recover
from rollout_engine.ledger.rows import Recovery

SCHEMA_VERSION = 1
_CURSOR_SHIFT = 20
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class OpenedLedger:
    """The parts of an open ledger; the writer thread owns all but the values."""

    folder: Path
    lock_file: int
    sql: sqlite3.Connection
    arrays: ArrayFiles
    database: Database
    recovery: Recovery
    ledger_id: str
    boot: int


def open_ledger(folder: Path, file_bytes: int, keep_committed: int, now_s: float) -> OpenedLedger:
    """Open and recover; blocks. Arguments and errors as of `Ledger.open`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock_file = _locked(folder)
        sql = _connect(folder / "ledger.sqlite")
        _prepare_schema(sql, uuid.uuid4().hex, now_s)
        arrays = ArrayFiles(folder / "arrays", file_bytes)
        database = Database(sql, arrays, keep_committed)
        recovery = recover(sql, arrays)
        for number in arrays.numbers():
            if not database.has_records(number):
                arrays.delete(number)
    except (sqlite3.Error, OSError) as error:
        raise translated(error, folder) from error
    return OpenedLedger(
        folder,
        lock_file,
        sql,
        arrays,
        database,
        recovery,
        database.meta("ledger_id"),
        int(database.meta("boots")),
    )


def _locked(folder: Path) -> int:
    lock_file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock_file)
        raise LedgerUnusableError(
            f"the ledger {folder} is open in another process; stop that engine, or give this one "
            "a folder of its own"
        ) from error
    return lock_file


def _connect(path: Path) -> sqlite3.Connection:
    """Open the database file, in WAL mode; the caller controls every transaction."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _prepare_schema(connection: sqlite3.Connection, ledger_id: str, born_at_s: float) -> None:
    """Make the tables of a new ledger, or check that those there are of a version known here.

    Raises:
        LedgerUnusableError: The file is of another schema version.

    """
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found == SCHEMA_VERSION:
        return
    if found != 0:
        raise LedgerUnusableError(
            f"the ledger has schema version {found}, this engine writes {SCHEMA_VERSION}: "
            "use an engine of the version that made it, or another folder"
        )
    schema = resources.files(__package__).joinpath("schema.sql").read_text(encoding="utf-8")
    # Cursors of a ledger start from its birth: those of a ledger it replaces are all smaller, so a
    # consumer that still has one misses nothing.
    base = int(born_at_s) << _CURSOR_SHIFT
    # One transaction: a ledger is either whole or not there.
    connection.executescript(
        f"BEGIN IMMEDIATE;\n{schema}\n"
        f"INSERT INTO meta VALUES ('ledger_id', '{uuid.UUID(ledger_id).hex}'),"
        f" ('cursor_base', '{base}'), ('boots', '0');\n"
        f"PRAGMA user_version = {SCHEMA_VERSION};\nCOMMIT;"
    )


def translated(error: Exception, folder: Path) -> Exception:
    """Turn an error of the disk or of SQLite into one of the ledger's own."""
    if isinstance(error, OSError):
        full = error.errno in _DISK_FULL
    elif isinstance(error, sqlite3.Error):
        full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    else:
        return error
    if full:
        return LedgerDiskFullError(
            f"the disk of the ledger {folder} is full; free some space, nothing finished is lost"
        )
    return LedgerError(f"the ledger {folder} failed: {type(error).__name__}: {error}")


__all__ = ["OpenedLedger", "open_ledger", "translated"]
