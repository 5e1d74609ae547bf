"""What a schedule happens to: a store, trainers, hosts and their engines, all of them simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weight_sync.core.manifest import PolicyVersion, digest
from weight_sync.core.receiver import Attempts, EngineState

Model = dict[str, int]
TENSORS = ("a", "b", "c")
RUN = "run"
BASE: Model = dict.fromkeys(TENSORS, 0)
ANCHOR_EVERY = 12
STUCK_AFTER = 2
HOSTS = 2
ENGINES = 2
HEALS_WITHIN = STUCK_AFTER + 2
"""Versions without a fault after which every engine must hold the newest."""

CRASHES = ("before the payload", "in the payload", "before the announcement", "after it")
DAMAGES = ("none",) * 6 + ("flipped", "missing", "twice the last", "swapped with the last")
LOADS = {
    # outcome of a load: (content after, label after, does the engine answer)
    "done": ("new", "new", True),
    "refused": ("old", "old", False),
    "torn": ("torn", "old", False),
    "torn under the new label": ("torn", "new", True),
    "stale under the new label": ("old", "new", True),
    "new under the old label": ("new", "old", True),
    "done, answer lost": ("new", "new", False),
    "killed": ("base", "default", False),
}


def checksums(model: Mapping[str, int]) -> dict[str, str]:
    return {name: digest(str(value).encode()) for name, value in model.items()}


@dataclass
class Stored:
    """A version in the store."""

    version: PolicyVersion
    base: int
    payload: Model
    """All tensors, or those that changed."""
    intact: bool = True
    """The payload has the checksum that the manifest names."""
    present: bool = True
    committed: bool = False


@dataclass
class Announced:
    version: PolicyVersion
    base: int


@dataclass
class Trainer:
    """A publisher, as long as it believes to be one."""

    incarnation: int
    next_number: int
    weights: Model
    step: int = 0
    snapshot: tuple[int, int, Model] | None = None
    """Number, deltas since the anchor, and content of what was announced last."""


@dataclass
class Machine:
    """An engine."""

    content: Model = field(default_factory=BASE.copy)
    label: str = "default"
    paused: bool = False
    life: int = 0
    state: EngineState = field(default_factory=EngineState)
    claimed_life: int = 0

    def restart(self) -> None:
        self.content, self.label, self.paused = BASE.copy(), "default", False
        self.life += 1


class Host:
    """A receiver and its engines."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.engines = [Machine() for _ in range(ENGINES)]
        self.inbox: list[Announced] = []
        self.start()

    def start(self) -> None:
        """Begin a receiver's life: it knows nothing, and trusts nothing on its disk."""
        self.newest: Announced | None = None
        self.whole: dict[int, tuple[PolicyVersion, Model]] = {}
        self.attempts = Attempts(STUCK_AFTER)
        self.target: Announced | None = None
        self.shadow: Model | None = None
        self.loading: Machine | None = None
        self.reached = 0
        """The newest version that it brought an engine to, in this life."""
        for engine in self.engines:
            engine.state = EngineState()
