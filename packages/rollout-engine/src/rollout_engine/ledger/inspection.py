"""A look into a ledger's folder from outside, while its engine may be running."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from rollout_engine.errors import LedgerUnusableError


def inspect_ledger(folder: Path) -> dict[str, Any]:
    """Count groups, tries and bytes of a ledger; writes nothing.

    Raises:
        LedgerUnusableError: There is no ledger, or it cannot be read.

    """
    path = folder / "ledger.sqlite"
    if not path.is_file():
        raise LedgerUnusableError(f"{folder} holds no ledger: {path.name} is missing")
    sql = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    try:
        sql.execute("BEGIN")
        return {
            "ledger_id": _one(sql, "SELECT value FROM meta WHERE key = 'ledger_id'"),
            "boots": int(_one(sql, "SELECT value FROM meta WHERE key = 'boots'")),
            "consumers": [
                {
                    "consumer_id": consumer_id,
                    "purpose": purpose,
                    "incarnation": incarnation,
                    "newest_cursor": cursor,
                    "groups": _counts(
                        sql,
                        "SELECT state, count(*) FROM groups WHERE consumer_id = ? GROUP BY state",
                        consumer_id,
                    ),
                }
                for consumer_id, purpose, incarnation, cursor in sql.execute(
                    "SELECT * FROM consumers ORDER BY consumer_id"
                ).fetchall()
            ],
            "tries": _counts(
                sql, "SELECT coalesce(outcome, 'RUNNING'), count(*) FROM tries GROUP BY 1"
            ),
            "faults": _counts(
                sql,
                "SELECT fault_stage || '.' || fault_cause, count(*) FROM tries"
                " WHERE fault_cause IS NOT NULL GROUP BY 1",
            ),
            "quarantined_tasks": [
                task
                for (task,) in sql.execute(
                    "SELECT DISTINCT task_id FROM groups WHERE fault_cause IS NOT NULL ORDER BY 1"
                )
            ],
            "array_bytes": sum(file.stat().st_size for file in (folder / "arrays").iterdir()),
        }
    except sqlite3.Error as error:
        raise LedgerUnusableError(f"the ledger {folder} cannot be read: {error}") from error
    finally:
        sql.close()


def _one(sql: sqlite3.Connection, query: str) -> Any:
    return sql.execute(query).fetchone()[0]


def _counts(sql: sqlite3.Connection, query: str, *values: str) -> dict[str, int]:
    return dict(sql.execute(query, values).fetchall())


__all__ = ["inspect_ledger"]
