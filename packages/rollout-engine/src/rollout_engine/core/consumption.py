"""What a consumer knows of its groups at one engine: the pure part of `client.GroupConsumer`."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from rollout_engine.types import Assignment, GroupKey


class Standing(enum.Enum):
    """Where a group stands, seen from its consumer.

    WANTED -> SENT -> ACCEPTED -> DELIVERED, and gone with the receipt. A lost connection takes SENT
    back to WANTED. A group that an engine remembers from an earlier life enters as ACCEPTED.
    """

    WANTED = "wanted"
    SENT = "sent"
    ACCEPTED = "accepted"
    DELIVERED = "delivered"


@dataclass(slots=True)
class _Entry:
    standing: Standing
    assignment: Assignment | None
    cursor: int = 0


class ConsumerBook:
    """Credits, cursor and standing of every group between assignment and receipt.

    Args:
        cursor: Everything up to it has been received, in this life or an earlier one.
        keep: Groups of an earlier life to go on with; all others are forgotten. None keeps all.

    """

    def __init__(self, cursor: int, keep: Collection[GroupKey] | None) -> None:
        self.cursor = cursor
        self.credits = 0
        self._delivered = cursor
        self._keep = None if keep is None else set(keep)
        self._entries: dict[GroupKey, _Entry] = {}
        self._withdrawn: dict[GroupKey, str] = {}

    @property
    def outstanding(self) -> frozenset[GroupKey]:
        """Groups assigned and not finished."""
        return frozenset(
            key for key, e in self._entries.items() if e.standing is not Standing.DELIVERED
        )

    @property
    def held(self) -> frozenset[GroupKey]:
        """Groups assigned and not received."""
        return frozenset(self._entries)

    @property
    def to_forget_all_but(self) -> frozenset[GroupKey] | None:
        """What a Forget message must keep; None when none has to be sent."""
        if self._keep is None:
            return None
        return frozenset(self._keep | self._entries.keys())

    @property
    def withdrawals(self) -> dict[GroupKey, str]:
        """Withdrawn groups and reasons, to be told again after a reconnection."""
        return dict(self._withdrawn)

    def standing(self, key: GroupKey) -> Standing | None:
        """Where a group stands; None for one that is unknown or received."""
        entry = self._entries.get(key)
        return None if entry is None else entry.standing

    def has_credit_for(self, key: GroupKey) -> bool:
        """Whether the group may be assigned now; one that the engine knows needs no credit."""
        return key in self._entries or len(self._entries) < self.credits

    def want(self, assignment: Assignment) -> Standing:
        """Take up an assignment, and give its standing: known groups keep theirs."""
        key = assignment.key
        self._withdrawn.pop(key, None)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(Standing.WANTED, assignment)
        elif entry.assignment is None:
            entry.assignment = assignment
        return entry.standing

    def to_send(self) -> list[Assignment]:
        """Assignments that wait to be sent, oldest first; they count as sent from now on."""
        waiting = []
        for entry in self._entries.values():
            if entry.standing is Standing.WANTED and entry.assignment is not None:
                entry.standing = Standing.SENT
                waiting.append(entry.assignment)
        return waiting

    def connected(self, credits_: int, known: Iterable[GroupKey]) -> None:
        """Take over what a Welcome says.

        Args:
            credits_: How many groups may be assigned and not received.
            known: Groups that the engine is running, or has finished and will deliver.

        """
        self.credits = credits_
        self._delivered = self.cursor
        known = set(known)
        for key, entry in self._entries.items():
            if entry.standing is Standing.DELIVERED:
                self._delivered = max(self._delivered, entry.cursor)
            elif key in known:
                entry.standing = Standing.ACCEPTED
            elif entry.assignment is not None:
                entry.standing = Standing.WANTED
        gone = [
            key
            for key, entry in self._entries.items()
            if entry.assignment is None
            and entry.standing is not Standing.DELIVERED
            and key not in known
        ]
        for key in gone:
            del self._entries[key]
        for key in known - self._entries.keys() - self._withdrawn.keys():
            if self._keep is None or key in self._keep:
                self._entries[key] = _Entry(Standing.ACCEPTED, None)

    def accepted(self, key: GroupKey) -> None:
        """The engine has the group in its ledger."""
        entry = self._entries.get(key)
        if entry is not None and entry.standing in (Standing.WANTED, Standing.SENT):
            entry.standing = Standing.ACCEPTED

    def put_off(self, key: GroupKey) -> None:
        """The engine has no room now; the group waits to be sent again."""
        entry = self._entries.get(key)
        if entry is not None and entry.standing is Standing.SENT:
            entry.standing = Standing.WANTED

    def refused(self, key: GroupKey) -> None:
        """The engine will not have the group."""
        entry = self._entries.get(key)
        if entry is not None and entry.standing in (Standing.WANTED, Standing.SENT):
            del self._entries[key]

    def forgot(self) -> None:
        """The engine has dropped what was not to be kept."""
        self._keep = None

    def expects(self, key: GroupKey, cursor: int) -> bool:
        """Whether a group that arrives is to be handed on, and is not a duplicate or given up."""
        entry = self._entries.get(key)
        return (
            entry is not None
            and entry.standing is not Standing.DELIVERED
            and cursor > self._delivered
        )

    def delivered(self, key: GroupKey, cursor: int) -> None:
        """The group is handed on; its credit returns with the receipt."""
        entry = self._entries[key]
        entry.standing = Standing.DELIVERED
        entry.cursor = cursor
        self._delivered = cursor

    def receive(self, cursor: int) -> None:
        """The consumer holds every group up to the cursor; their credits return."""
        self.cursor = max(self.cursor, cursor)
        for key in [
            key
            for key, entry in self._entries.items()
            if entry.standing is Standing.DELIVERED and entry.cursor <= cursor
        ]:
            del self._entries[key]

    def withdraw(self, key: GroupKey, reason: str) -> None:
        """Give a group up; whatever of it still arrives is not handed on."""
        self._entries.pop(key, None)
        self._withdrawn[key] = reason

    def settled(self, key: GroupKey) -> None:
        """The engine has recorded the consumer's decision on the group."""
        self._withdrawn.pop(key, None)

    def ledger_replaced(self) -> None:
        """The engine's ledger is another than the cursor's: start over with it."""
        self.cursor = 0
        self._delivered = 0


__all__ = ["ConsumerBook", "Standing"]
