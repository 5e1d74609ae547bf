"""The book of groups: which are out, which arrived, what became of each.

One place holds the state of every group and allows only these moves:

    (new) -> ASSIGNED -> READY -> decided
                ^           |
                +-----------+  assigned again, under the next epoch

A group is accepted under exactly one epoch and from one engine. A decision is `pending` until a
checkpoint that holds it is on disk; only then may the engine hear of it and drop the group's
arrays. Everything needed to go on after a crash is in `snapshot()`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollout_engine.types import Decision, GroupKey

FIRST_EPOCH = 1

Claim = tuple[GroupKey, str]
"""A group under one epoch at one engine."""


class Phase(enum.StrEnum):
    """Where a live group is."""

    ASSIGNED = "ASSIGNED"
    READY = "READY"


class Reception(enum.StrEnum):
    """What to do with a group that an engine delivered."""

    ACCEPTED = "ACCEPTED"
    """It counts: it is ready now."""
    REPEATED = "REPEATED"
    """It was accepted before and waits to be decided; nothing changes."""
    DECIDED = "DECIDED"
    """It was decided before; the engine is to hear that decision again."""
    SUPERSEDED = "SUPERSEDED"
    """It counts under another epoch or from another engine; it is decided as withdrawn."""


@dataclass(frozen=True, slots=True)
class LiveGroup:
    """A group that is not decided."""

    ordinal: int
    """Its place in the order of starts; groups train oldest first."""
    key: GroupKey
    task_id: str
    phase: Phase
    engine: str = ""
    """Which engine has it; empty while none has taken it."""
    min_version: int = 0
    """Number of the oldest weights that its attempts may start on."""
    started_step: int = 0
    """Optimizer steps of the newest weights when it was assigned."""
    traceparent: str = ""
    cursor: int = 0
    """Where in the engine's order it was delivered; 0 before that."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A group's decision, and the optimizer step that trained it."""

    key: GroupKey
    engine: str
    decision: Decision
    step: int = 0

    @property
    def claim(self) -> Claim:
        """What was decided on."""
        return self.key, self.engine


class GroupBook:
    """State of every group of a stage.

    Args:
        prefix: Of group ids; an id is the prefix and the group's ordinal.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._next = 0
        self._live: dict[int, LiveGroup] = {}
        # Ordinals from `_next` on that are decided already: see `open`.
        self._decided_ahead: set[int] = set()
        self._undurable: dict[Claim, Verdict] = {}
        self._durable: dict[Claim, Verdict] = {}
        self._delivered: dict[str, int] = {}

    @property
    def next_ordinal(self) -> int:
        """The ordinal that `open` gives next."""
        return self._next

    @property
    def in_flight(self) -> int:
        """Groups that are assigned and have not arrived."""
        return sum(group.phase is Phase.ASSIGNED for group in self._live.values())

    @property
    def ready(self) -> int:
        """Groups that arrived and are not decided."""
        return len(self._live) - self.in_flight

    @property
    def live(self) -> tuple[LiveGroup, ...]:
        """Groups that are not decided, oldest first."""
        return tuple(self._live[ordinal] for ordinal in sorted(self._live))

    @property
    def pending(self) -> tuple[Claim, ...]:
        """Decisions that no checkpoint holds yet."""
        return tuple(self._undurable)

    @property
    def cursors(self) -> dict[str, int]:
        """Where to resume each engine's deliveries, so that no undecided group is left out."""
        floors = dict(self._delivered)
        for group in self._live.values():
            if group.phase is Phase.READY:
                floors[group.engine] = min(floors[group.engine], group.cursor - 1)
        return floors

    def group_id(self, ordinal: int) -> str:
        """Return the id of the group with this ordinal."""
        return f"{self._prefix}{ordinal:06d}"

    def ordinal(self, group_id: str) -> int | None:
        """Return the ordinal in an id; None for an id of another book."""
        digits = group_id.removeprefix(self._prefix)
        if not group_id.startswith(self._prefix) or not digits.isdecimal():
            return None
        return int(digits)

    def find(self, key: GroupKey) -> LiveGroup | None:
        """Return the live group with this key, epoch included."""
        ordinal = self.ordinal(key.group_id)
        group = None if ordinal is None else self._live.get(ordinal)
        return group if group is not None and group.key == key else None

    def open(self, task_id: str, *, min_version: int = 0, step: int = 0) -> LiveGroup | None:
        """Take the next ordinal for a group on this task.

        A crash can lose the knowledge of groups that were assigned after the last checkpoint, and
        they may arrive before their ordinal is opened again. Such a group is returned as it is,
        with the task it was made for; if it is decided already, there is nothing to return.
        """
        ordinal = self._next
        self._next += 1
        if ordinal in self._decided_ahead:
            self._decided_ahead.remove(ordinal)
            return None
        if ordinal in self._live:
            return self._live[ordinal]
        return self._put(
            LiveGroup(
                ordinal,
                GroupKey(self.group_id(ordinal), FIRST_EPOCH),
                task_id,
                Phase.ASSIGNED,
                min_version=min_version,
                started_step=step,
            )
        )

    def place(self, key: GroupKey, engine: str) -> LiveGroup:
        """Note which engine is to have a group."""
        return self._put(replace(self._require(key), engine=engine))

    def trace(self, key: GroupKey, traceparent: str) -> LiveGroup:
        """Note the trace that a group's attempts belong to."""
        return self._put(replace(self._require(key), traceparent=traceparent))

    def deliver(self, key: GroupKey, task_id: str, engine: str, cursor: int) -> Reception:
        """Take in a finished group, or say why it does not count."""
        self._delivered[engine] = max(cursor, self._delivered.get(engine, 0))
        claim = (key, engine)
        if claim in self._undurable or claim in self._durable:
            return Reception.DECIDED
        ordinal = self.ordinal(key.group_id)
        group = None if ordinal is None else self._live.get(ordinal)
        if ordinal is not None and group is None and self._unknown(ordinal):
            # Assigned after the checkpoint that this trainer resumed from.
            group = self._put(LiveGroup(ordinal, key, task_id, Phase.ASSIGNED))
            self._withdraw_epochs(key, engine, range(FIRST_EPOCH, key.epoch))
        if group is None or key.epoch < group.key.epoch:
            self._undurable[claim] = Verdict(key, engine, Decision.WITHDRAWN)
            return Reception.SUPERSEDED
        if group.phase is Phase.READY:
            if group.key == key and group.engine == engine:
                return Reception.REPEATED
            self._undurable[claim] = Verdict(key, engine, Decision.WITHDRAWN)
            return Reception.SUPERSEDED
        # A later epoch is one that a crash made this book forget.
        self._withdraw_epochs(key, group.engine or engine, range(group.key.epoch, key.epoch))
        self._put(
            replace(
                group,
                key=key,
                phase=Phase.READY,
                engine=engine,
                task_id=task_id,
                cursor=cursor,
            )
        )
        return Reception.ACCEPTED

    def reassign(
        self, key: GroupKey, decision: Decision = Decision.WITHDRAWN, *, step: int = 0
    ) -> LiveGroup:
        """End a group's present assignment with a decision and open the next epoch at a step.

        For a group whose engine is lost (`WITHDRAWN`), or whose tokens are of a branch that was
        thrown away (`STALE`).
        """
        group = self._require(key)
        self._decide(group, decision)
        # Later epochs may be decided already: those that a crash made this book forget.
        decided = (claimed for claimed, _ in (*self._undurable, *self._durable))
        taken = [other.epoch for other in decided if other.group_id == key.group_id]
        fresh = GroupKey(key.group_id, max(key.epoch, *taken) + 1)
        return self._put(
            replace(
                group,
                key=fresh,
                phase=Phase.ASSIGNED,
                engine="",
                cursor=0,
                traceparent="",
                started_step=step,
            )
        )

    def decide(self, key: GroupKey, decision: Decision, *, step: int = 0) -> Verdict:
        """Settle a group for good.

        Raises:
            KeyError: No live group has this key: it was decided before, or never accepted.
        """
        group = self._require(key)
        del self._live[group.ordinal]
        if group.ordinal >= self._next:
            self._decided_ahead.add(group.ordinal)
        return self._decide(group, decision, step)

    def give_up(self, key: GroupKey, engine: str) -> bool:
        """Settle a group that an engine holds and that a crash made this book forget.

        Returns:
            False if the group is known here: it has its decision, or gets it with the others.
        """
        claim = (key, engine)
        if claim in self._undurable or claim in self._durable or self.find(key) is not None:
            return False
        self._undurable[claim] = Verdict(key, engine, Decision.WITHDRAWN)
        return True

    def checkpointed(self, claims: Iterable[Claim]) -> tuple[Verdict, ...]:
        """Note that a checkpoint with these decisions is on disk.

        Returns:
            Every decision on disk that engines have not confirmed, in the order they were made.
        """
        for claim in claims:
            verdict = self._undurable.pop(claim, None)
            if verdict is not None:
                self._durable[claim] = verdict
        return tuple(self._durable.values())

    def durable(self, claim: Claim) -> Verdict | None:
        """Return a decision that is on disk and not confirmed by its engine; else None."""
        return self._durable.get(claim)

    def committed(self, claim: Claim) -> None:
        """Note that the engine has heard the decision and may drop the group."""
        self._durable.pop(claim, None)

    def snapshot(self) -> dict[str, Any]:
        """Return everything as JSON values. Decisions made so far count as held by it."""
        verdicts = [*self._durable.values(), *self._undurable.values()]
        return {
            "prefix": self._prefix,
            "next": self._next,
            "live": [_live_row(group) for group in self.live],
            "decided_ahead": sorted(self._decided_ahead),
            "verdicts": [_verdict_row(verdict) for verdict in verdicts],
            "cursors": self.cursors,
        }

    @classmethod
    def restore(cls, snapshot: Mapping[str, Any]) -> GroupBook:
        """Rebuild a book. Ready groups are awaited again: the engines still hold their arrays."""
        book = cls(snapshot["prefix"])
        book._next = snapshot["next"]
        book._decided_ahead = set(snapshot["decided_ahead"])
        book._delivered = dict(snapshot["cursors"])
        for row in snapshot["live"]:
            group = _live_group(book, row)
            book._live[group.ordinal] = group
        for group_id, epoch, engine, decision, step in snapshot["verdicts"]:
            verdict = Verdict(GroupKey(group_id, epoch), engine, Decision(decision), step)
            book._durable[verdict.claim] = verdict
        return book

    def _unknown(self, ordinal: int) -> bool:
        return ordinal >= self._next and ordinal not in self._decided_ahead

    def _withdraw_epochs(self, key: GroupKey, engine: str, epochs: Iterable[int]) -> None:
        for epoch in epochs:
            verdict = Verdict(GroupKey(key.group_id, epoch), engine, Decision.WITHDRAWN)
            self._undurable[verdict.claim] = verdict

    def _decide(self, group: LiveGroup, decision: Decision, step: int = 0) -> Verdict:
        verdict = Verdict(group.key, group.engine, decision, step)
        self._undurable[verdict.claim] = verdict
        return verdict

    def _require(self, key: GroupKey) -> LiveGroup:
        group = self.find(key)
        if group is None:
            raise KeyError(f"no live group {key}")
        return group

    def _put(self, group: LiveGroup) -> LiveGroup:
        self._live[group.ordinal] = group
        return group


def _live_row(group: LiveGroup) -> list[Any]:
    return [
        group.ordinal,
        group.key.epoch,
        group.task_id,
        group.engine,
        group.min_version,
        group.started_step,
        group.traceparent,
    ]


def _live_group(book: GroupBook, row: list[Any]) -> LiveGroup:
    ordinal, epoch, task_id, engine, min_version, started_step, traceparent = row
    key = GroupKey(book.group_id(ordinal), epoch)
    return LiveGroup(
        ordinal, key, task_id, Phase.ASSIGNED, engine, min_version, started_step, traceparent
    )


def _verdict_row(verdict: Verdict) -> list[Any]:
    key = verdict.key
    return [key.group_id, key.epoch, verdict.engine, verdict.decision.value, verdict.step]
