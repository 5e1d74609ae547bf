"""What the ledger takes and gives: frozen values, no SQL."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from rollout_engine.core.group import Slot
from rollout_engine.types import Decision, Fault, FaultedTry, GroupKey, Outcome


class GroupStanding(enum.StrEnum):
    """Where a group stands in the ledger; see `schema.sql`."""

    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    RECEIVED = "RECEIVED"
    COMMITTED = "COMMITTED"
    WITHDRAWN = "WITHDRAWN"


@dataclass(frozen=True, slots=True, order=True)
class GroupRef:
    """A group of a consumer: the ledger's key for one."""

    consumer_id: str
    key: GroupKey

    def __str__(self) -> str:
        return f"{self.key} of {self.consumer_id}"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What `Ledger.accept` did.

    Attributes:
        new: The group was not known, and is to be started.
        redelivered: It had been received and will be delivered again.
        sequence: Rises with every group accepted; the lowest is the oldest.
        superseded: Groups of earlier epochs that this one takes the place of.
    """

    new: bool
    redelivered: bool
    sequence: int
    superseded: tuple[GroupRef, ...] = ()


@dataclass(frozen=True, slots=True)
class KnownGroup:
    """A group of a consumer that is not committed."""

    key: GroupKey
    standing: GroupStanding
    cursor: int


@dataclass(frozen=True, slots=True)
class Reconnection:
    """What a consumer's Hello finds."""

    newest_cursor: int
    groups: tuple[KnownGroup, ...]


@dataclass(frozen=True, slots=True)
class EndedTry:
    """A try that has ended.

    Attributes:
        final: It is the one delivered for its attempt.
        counted: A fault that counts against the cap of refills.
        payload: The serialised attempt, for a final one.
    """

    ref: GroupRef
    index: int
    try_number: int
    outcome: Outcome
    turns: int
    tokens: int
    ended_at_s: float
    final: bool
    counted: bool = False
    fault: Fault | None = None
    payload: bytes | None = None


@dataclass(frozen=True, slots=True)
class StoredAttempt:
    """A serialised attempt as it was stored, verified."""

    index: int
    payload: bytes
    checksum: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """A finished group, ready to be sent."""

    key: GroupKey
    task_id: str
    cursor: int
    attempts: tuple[StoredAttempt, ...]
    quarantined: Fault | None
    faulted_tries: tuple[FaultedTry, ...]


@dataclass(frozen=True, slots=True)
class ResumedGroup:
    """A group that a dead engine was running, to be gone on with.

    Attributes:
        assignment: As it was accepted, serialised.
        slots: What is known of each index that had a try; RUNNING ones were cut off.
    """

    ref: GroupRef
    sequence: int
    assignment: bytes
    slots: dict[int, Slot]


@dataclass(frozen=True, slots=True)
class Recovery:
    """What opening a ledger found.

    Attributes:
        cut_bytes: Array bytes that no row named: the tail of a write that was cut off.
        cut_off_tries: Tries that ran when the engine died.
        damaged_attempts: Finished attempts whose bytes are lost; they are made again.
    """

    groups: tuple[ResumedGroup, ...]
    finished_groups: int
    cut_bytes: int
    cut_off_tries: int
    damaged_attempts: int


@dataclass(frozen=True, slots=True)
class CommittedGroup:
    """What became of a group, as its consumer said."""

    decision: Decision
    step: int


__all__ = [
    "Acceptance",
    "CommittedGroup",
    "Delivery",
    "EndedTry",
    "GroupRef",
    "GroupStanding",
    "KnownGroup",
    "Reconnection",
    "Recovery",
    "ResumedGroup",
    "StoredAttempt",
]
