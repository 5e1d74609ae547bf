"""A group of attempts: who runs, who is refilled after a fault, and when the group is finished.

Each index has one attempt, made by one try after another until one ends validly. A fault refills
that index alone; too many faults give the index up, and the group is quarantined.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollout_engine.types import Fault


class SlotStatus(enum.StrEnum):
    """Where one index of a group stands."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    VALID = "VALID"
    GIVEN_UP = "GIVEN_UP"


_FINAL = (SlotStatus.VALID, SlotStatus.GIVEN_UP)


@dataclass(frozen=True, slots=True)
class RefillPolicy:
    """How often faults are refilled.

    Attributes:
        per_attempt: Refills of one index after faults; restarts of the engine do not count.
        per_group: Faults of all indices together, after which nothing is refilled any more.
    """

    per_attempt: int = 3
    per_group: int = 16

    def __post_init__(self) -> None:
        if self.per_attempt < 0 or self.per_group < 0:
            raise ValueError(f"expected numbers >= 0, got {self}")


@dataclass(frozen=True, slots=True)
class Slot:
    """One index of a group: its current try and the faults that count against it."""

    status: SlotStatus = SlotStatus.PENDING
    try_number: int = 0
    faults: int = 0
    last_fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class GroupState:
    """State of a whole group. Its methods give the next state."""

    slots: tuple[Slot, ...]

    @classmethod
    def new(cls, attempts: int) -> GroupState:
        """Give a group in which nothing has started."""
        if attempts < 1:
            raise ValueError(f"a group has at least 1 attempt, got {attempts}")
        return cls(tuple(Slot() for _ in range(attempts)))

    @classmethod
    def recovered(cls, slots: Mapping[int, Slot], attempts: int) -> GroupState:
        """Give the group as a ledger remembers it; indices that it does not know are new."""
        return cls(tuple(slots.get(index, Slot()) for index in range(attempts)))

    @property
    def pending(self) -> tuple[int, ...]:
        """Indices that wait for a try to start."""
        return tuple(i for i, s in enumerate(self.slots) if s.status is SlotStatus.PENDING)

    @property
    def finished(self) -> bool:
        """Whether every index has ended for good."""
        return all(slot.status in _FINAL for slot in self.slots)

    @property
    def valid(self) -> int:
        """How many attempts ended validly."""
        return sum(slot.status is SlotStatus.VALID for slot in self.slots)

    @property
    def faults(self) -> int:
        """Faults that count, over all indices."""
        return sum(slot.faults for slot in self.slots)

    @property
    def quarantined(self) -> Fault | None:
        """The last fault of an index that was given up, if any was."""
        for slot in reversed(self.slots):
            if slot.status is SlotStatus.GIVEN_UP:
                return slot.last_fault
        return None

    def leased(self, index: int) -> GroupState:
        """The index's current try starts."""
        return self._with(index, SlotStatus.PENDING, status=SlotStatus.RUNNING)

    def ended_validly(self, index: int) -> GroupState:
        """The index's try ended as the policy made it end."""
        return self._with(index, SlotStatus.RUNNING, status=SlotStatus.VALID)

    def faulted(self, index: int, fault: Fault, policy: RefillPolicy) -> GroupState:
        """The index's try ended as a fault: its next try is PENDING, or the index is GIVEN_UP."""
        slot = self.slots[index]
        faults = slot.faults + 1
        refill = faults <= policy.per_attempt and self.faults + 1 <= policy.per_group
        return self._with(
            index,
            SlotStatus.RUNNING,
            status=SlotStatus.PENDING if refill else SlotStatus.GIVEN_UP,
            try_number=slot.try_number + refill,
            faults=faults,
            last_fault=fault,
        )

    def _with(self, index: int, expected: SlotStatus, **changes: object) -> GroupState:
        slot = self.slots[index]
        if slot.status is not expected:
            raise ValueError(f"attempt {index} of the group is {slot.status}; expected {expected}")
        changed = replace(slot, **changes)  # type: ignore[arg-type]
        return GroupState((*self.slots[:index], changed, *self.slots[index + 1 :]))


__all__ = ["GroupState", "RefillPolicy", "Slot", "SlotStatus"]
