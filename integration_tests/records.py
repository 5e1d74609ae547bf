"""What a run has written: the ledger, the trainer's checkpoints and events; read from outside."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LedgerAttempt:
    """A finished attempt as the ledger has it."""

    group_id: str
    epoch: int
    index: int
    try_number: int
    outcome: str
    checksum: bytes


@dataclass(frozen=True)
class LedgerGroup:
    """A group as the ledger has it."""

    group_id: str
    epoch: int
    state: str
    decision: str | None
    step: int | None
    fault_cause: str | None
    """Why it is quarantined."""


@dataclass(frozen=True)
class LedgerView:
    """The ledger at one moment."""

    groups: Mapping[tuple[str, int], LedgerGroup]
    attempts: Mapping[tuple[str, int, int], LedgerAttempt]
    running: int

    def trained(self) -> list[LedgerGroup]:
        """Groups that the trainer has said it trained."""
        return [group for group in self.groups.values() if group.decision == "TRAINED"]


def read_ledger(folder: Path) -> LedgerView:
    """Read a ledger while its engine may be running; one transaction, nothing is written."""
    sql = sqlite3.connect(f"{(folder / 'ledger.sqlite').as_uri()}?mode=ro", uri=True, timeout=10)
    with contextlib.closing(sql):
        sql.execute("BEGIN")
        groups = {
            (row[0], row[1]): LedgerGroup(*row)
            for row in sql.execute(
                "SELECT group_id, epoch, state, decision, step, fault_cause FROM groups"
            )
        }
        attempts = {
            (row[0], row[1], row[2]): LedgerAttempt(*row)
            for row in sql.execute(
                "SELECT group_id, epoch, attempt, try, outcome, checksum FROM tries"
                " JOIN groups USING (group_row) WHERE final = 1"
            )
        }
        [running] = sql.execute("SELECT count(*) FROM tries WHERE outcome IS NULL").fetchone()
    return LedgerView(groups, attempts, running)


@dataclass(frozen=True)
class TrainedGroup:
    """A decision that a checkpoint of the trainer holds."""

    group_id: str
    epoch: int
    step: int


def trained_groups(stage_folder: Path) -> set[TrainedGroup]:
    """Every group that any checkpoint of the stage says was trained."""
    return {
        TrainedGroup(group_id, epoch, step)
        for state in checkpoint_states(stage_folder)
        for group_id, epoch, _, decision, step in state["stage"]["flow"]["book"]["verdicts"]
        if decision == "TRAINED"
    }


def checkpoint_states(stage_folder: Path) -> Iterator[dict[str, Any]]:
    """The states of all checkpoints."""
    for folder in sorted((stage_folder / "checkpoints").glob("step-*")):
        yield json.loads((folder / "state.json").read_text())


def stage_events(stage_folder: Path) -> list[dict[str, Any]]:
    """The trainer's own record of the stage's events, over all its lives."""
    lines = (stage_folder / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
