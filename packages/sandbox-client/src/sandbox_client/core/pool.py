"""The warm pool: which idle sandboxes to keep for the next creates, which to make and to end.

A kind stands for everything that makes two sandboxes alike. A kind that was asked for lately gets
up to `per_kind` idle sandboxes; the whole pool stays within its count and its memory, and where
that does not suffice for all, the kinds asked for last have them. Time is an argument.
"""

from collections import Counter
from dataclasses import dataclass

__all__ = ["PoolBounds", "PoolPlan", "WarmPool"]


@dataclass(frozen=True)
class PoolBounds:
    """How much may be kept."""

    sandboxes: int
    """Idle sandboxes of all kinds; 0 keeps none."""
    memory_bytes: int
    """Memory of all of them, each counted as `idle_bytes`."""
    idle_bytes: int
    per_kind: int
    demand_s: float
    """How long after its last create a kind is kept warm."""

    @property
    def total(self) -> int:
        """How many fit."""
        return min(self.sandboxes, self.memory_bytes // max(1, self.idle_bytes))


@dataclass(frozen=True)
class PoolPlan:
    """What to do now: the kind to make one of, if any, and the sandboxes to end."""

    make: str | None
    end: tuple[str, ...]


class WarmPool:
    """What is idle and what was asked for.

    A sandbox is `making` (counted by its kind), then `idle`, then taken, lost or ended; it leaves
    the pool with each of the three.
    """

    def __init__(self, bounds: PoolBounds) -> None:
        self.bounds = bounds
        self._idle: dict[str, str] = {}
        self._making: Counter[str] = Counter()
        self._asked: dict[str, float] = {}

    def __len__(self) -> int:
        """Idle sandboxes and those being made."""
        return len(self._idle) + self._making.total()

    def find(self, kind: str) -> str | None:
        """The sandbox that `ask` would give; the longest idle one."""
        return next((s for s, its in self._idle.items() if its == kind), None)

    def ask(self, kind: str, now: float) -> str | None:
        """Counts a create of this kind and gives it an idle sandbox if there is one."""
        # The latest comes last.
        self._asked.pop(kind, None)
        self._asked[kind] = now
        found = self.find(kind)
        if found is not None:
            del self._idle[found]
        return found

    def started(self, kind: str) -> None:
        """One of this kind is being made."""
        self._making[kind] += 1

    def failed(self, kind: str) -> None:
        """It could not be made; the kind waits until it is asked for again."""
        self._making[kind] -= 1
        self._asked.pop(kind, None)

    def made(self, kind: str, sandbox_id: str) -> None:
        """It is idle now."""
        self._making[kind] -= 1
        self._idle[sandbox_id] = kind

    def remove(self, sandbox_id: str) -> None:
        """It was lost, or is being ended."""
        self._idle.pop(sandbox_id, None)

    def is_asked(self, kind: str) -> bool:
        """Whether one more of this kind may still be made."""
        return kind in self._asked

    def plan(self, now: float) -> PoolPlan:
        """What to do next. `make` is one at a time: ask again once it is `started`."""
        for kind, asked in list(self._asked.items()):
            if now - asked > self.bounds.demand_s:
                del self._asked[kind]
        wanted = self._wanted()
        have: Counter[str] = Counter()
        end = []
        for sandbox_id, kind in self._idle.items():
            have[kind] += 1
            if have[kind] > wanted[kind]:
                end.append(sandbox_id)
        have.update(self._making)
        # What ends still takes its place until it is removed.
        room = len(self) < self.bounds.total
        make = next((kind for kind in wanted if have[kind] < wanted[kind]), None)
        return PoolPlan(make if room else None, tuple(end))

    def _wanted(self) -> Counter[str]:
        """How many of each kind to have, the kind asked for last first."""
        wanted: Counter[str] = Counter()
        left = self.bounds.total
        for kind in reversed(self._asked):
            wanted[kind] = min(self.bounds.per_kind, left)
            left -= wanted[kind]
        return wanted
