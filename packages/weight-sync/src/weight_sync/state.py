"""What the service must not forget: who may publish, and what was announced. In SQLite."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service_kit.errors import StartupError

from weight_sync.core.manifest import PolicyVersion
from weight_sync.core.publisher import RunRecord, acquire, admit
from weight_sync.errors import NumberNotRising, StoreFull
from weight_sync.locks import exclusive
from weight_sync.types import AnnouncedVersion

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    run TEXT PRIMARY KEY,
    incarnation INTEGER NOT NULL,
    last_number INTEGER NOT NULL,
    holder TEXT NOT NULL,
    acquired INTEGER NOT NULL UNIQUE  -- rises with every acquisition of any run
) STRICT;
CREATE TABLE IF NOT EXISTS versions (
    run TEXT NOT NULL REFERENCES runs (run),
    number INTEGER NOT NULL,
    incarnation INTEGER NOT NULL,
    step INTEGER NOT NULL,
    parent INTEGER NOT NULL,
    root_hash TEXT NOT NULL,
    manifest_uri TEXT NOT NULL,
    payload_bytes INTEGER NOT NULL,
    base INTEGER NOT NULL,
    traceparent TEXT NOT NULL,
    PRIMARY KEY (run, number)
) STRICT;
"""
_FORMAT = 1
_LOCKS_HELP = "stop the other service, or set state_dir to another folder"


class VersionLog:
    """The durable record of runs and versions. Every change is on disk when its method returns.

    `acquire` and `announce` block for some milliseconds: call them from a thread; they take turns.
    The others only look into memory.
    """

    def __init__(self, folder: Path) -> None:
        """Open the record in `folder`, making it if need be, and keep others out.

        Raises:
            StartupError: another process has it open, or it is not such a record.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = exclusive(folder / "lock", _LOCKS_HELP)
        path = folder / "versions.sqlite3"
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            found = self._db.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, _FORMAT):
                raise StartupError(
                    f"{path}: this release reads format {_FORMAT}, found {found}, of a newer one. "
                    "Install that release, or set state_dir to another folder"
                )
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version = {_FORMAT}")
        except sqlite3.DatabaseError as error:
            raise StartupError(
                f"{path}: not a usable record of versions: {error}. Restore it, or move it away "
                "and let the trainer acquire anew: it knows its last number"
            ) from error
        self._turn = threading.Lock()
        self._versions: dict[str, dict[int, AnnouncedVersion]] = {}
        self._records: dict[str, RunRecord] = {}
        self._current = ""
        self._load()

    def close(self) -> None:
        """Close the record and let others open it."""
        self._db.close()
        self._lock.close()

    def acquire(self, run: str, *, holder: str, known_number: int) -> RunRecord:
        """Give publishing for a run to a new incarnation."""
        with self._turn:
            return self._acquire(run, holder, known_number)

    def _acquire(self, run: str, holder: str, known_number: int) -> RunRecord:
        # Numbers rise over all runs of a service, so that an engine's label names one version.
        highest = max((record.last_number for record in self._records.values()), default=0)
        record = acquire(
            self._records.get(run, RunRecord(run)), known_number=max(known_number, highest)
        )
        with self._transaction() as db:
            db.execute(
                "INSERT INTO runs VALUES (?, ?, ?, ?, (SELECT 1 + coalesce(max(acquired), 0)"
                " FROM runs)) ON CONFLICT (run) DO UPDATE SET incarnation = excluded.incarnation,"
                " last_number = excluded.last_number, holder = excluded.holder,"
                " acquired = excluded.acquired",
                (run, record.incarnation, record.last_number, holder),
            )
        self._records[run] = record
        self._current = run
        return record

    def check(self, announced: AnnouncedVersion) -> None:
        """Say now why an announcement would be refused, before anything else of it is looked at.

        Raises:
            Fenced, NumberNotRising, AnchorRequired: as `announce`.
        """
        with self._turn:
            self._admitted(announced)

    def announce(self, announced: AnnouncedVersion) -> bool:
        """Record an announcement; False if the very same one is there already.

        Raises:
            Fenced, NumberNotRising, AnchorRequired: see `core.publisher.admit`.
            StoreFull: the disk of the record is full.
        """
        with self._turn:
            return self._announce(announced)

    def _announce(self, announced: AnnouncedVersion) -> bool:
        version = announced.version
        record = self._admitted(announced)
        if record is None:
            return False
        with self._transaction() as db:
            db.execute(
                "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    version.run,
                    version.number,
                    version.incarnation,
                    version.step,
                    version.parent,
                    version.root_hash,
                    announced.manifest_uri,
                    announced.payload_bytes,
                    announced.base,
                    announced.traceparent,
                ),
            )
            db.execute(
                "UPDATE runs SET last_number = ? WHERE run = ?", (version.number, version.run)
            )
        self._records[version.run] = record
        self._versions.setdefault(version.run, {})[version.number] = announced
        return True

    def _admitted(self, announced: AnnouncedVersion) -> RunRecord | None:
        """Return the record with an announcement in it; None: the very same is there already."""
        version = announced.version
        known = self._records.get(version.run, RunRecord(version.run))
        try:
            return admit(known, version, base=announced.base)
        except NumberNotRising:
            # A publisher that lost the answer asks again: that is no second version.
            if self._versions.get(version.run, {}).get(version.number) == announced:
                return None
            raise

    def record(self, run: str) -> RunRecord:
        """Return what is known of a run's publishers."""
        return self._records.get(run, RunRecord(run))

    @property
    def current_run(self) -> str:
        """The run acquired last; empty: none was."""
        return self._current

    def versions(self, run: str, *, after_number: int = 0) -> list[AnnouncedVersion]:
        """Return a run's announced versions above a number, oldest first."""
        found = self._versions.get(run, {})
        return [found[number] for number in sorted(found) if number > after_number]

    def find(self, run: str, number: int) -> AnnouncedVersion | None:
        """Return one announced version."""
        return self._versions.get(run, {}).get(number)

    def newest(self, run: str) -> AnnouncedVersion | None:
        """Return a run's newest version."""
        found = self._versions.get(run)
        return found[max(found)] if found else None

    def behind(self, run: str, number: int) -> int:
        """Count a run's versions above a number."""
        return sum(1 for other in self._versions.get(run, {}) if other > number)

    def _load(self) -> None:
        # Everything is read here, once: no reader ever sees what a commit has not made durable.
        for row in self._db.execute("SELECT * FROM versions"):
            announced = _announced(*row)
            version = announced.version
            self._versions.setdefault(version.run, {})[version.number] = announced
        rows = self._db.execute("SELECT run, incarnation, last_number FROM runs ORDER BY acquired")
        for run, incarnation, last_number in rows:
            own = frozenset(
                number
                for number, announced in self._versions.get(run, {}).items()
                if announced.version.incarnation == incarnation
            )
            self._records[run] = RunRecord(run, incarnation, last_number, own)
            self._current = run

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
        except sqlite3.OperationalError as error:
            if "full" not in str(error):
                raise
            raise StoreFull(
                f"the record of versions could not grow: {error}. Free space in state_dir, then "
                "announce again"
            ) from error


def _announced(
    run: str,
    number: int,
    incarnation: int,
    step: int,
    parent: int,
    root_hash: str,
    manifest_uri: str,
    payload_bytes: int,
    base: int,
    traceparent: str,
) -> AnnouncedVersion:
    """Build a version from a row, its columns in the table's order."""
    return AnnouncedVersion(
        version=PolicyVersion(
            run=run,
            incarnation=incarnation,
            number=number,
            step=step,
            parent=parent,
            root_hash=root_hash,
        ),
        manifest_uri=manifest_uri,
        payload_bytes=payload_bytes,
        base=base,
        traceparent=traceparent,
    )
