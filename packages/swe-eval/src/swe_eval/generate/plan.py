"""Which bugs of a repository become tasks: their order, their limits and their identity.

Nothing here runs code. Decisions are made in the order of the candidates, whatever was tried at
the same time, so that the same repository, seed and options give the same tasks.
"""

from __future__ import annotations

import ast
import hashlib
import random
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from swe_eval.generate.places import Bug, Place
from swe_eval.generate.select import fingerprint

__all__ = [
    "RUN_ENDS",
    "Candidate",
    "Known",
    "Outcome",
    "Selection",
    "SuiteRun",
    "Trial",
    "behaviour_of",
    "fingerprint_of",
    "in_turn",
    "judge",
    "run_limit",
]

PASSED, FAILED, ERROR, SKIPPED, MISSING = "p", "f", "e", "s", "-"
"""Letters of a suite's run, one for each test: those of the grader's records, and none at all."""


class Outcome(StrEnum):
    """What became of a candidate."""

    KEPT = "kept"
    UNNOTICED = "no_test_failed"
    BROKE_SUITE = "suite_broke"
    """The tests could not be collected, or none that passed before still does."""
    TIMEOUT = "timeout"
    DIED = "died"
    """The test process ended by itself: out of memory, or a crash."""
    FLAKY = "flaky"
    """No test failed in both runs."""
    DUPLICATE = "duplicate"
    CAPPED = "capped"
    """Its function or file has as many tasks as it may."""
    SHOWN = "shown"
    """Another file has the unbroken function, or the source with the bug in the failing test."""
    INVALID = "invalid"
    """No change, or no valid Python."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A place for a bug, and the tests that reach the function around it."""

    path: str
    place: Place
    tests: tuple[str, ...]

    @property
    def span(self) -> tuple[int, int]:
        """First and last line of the function."""
        return self.place.first_line, self.place.last_line


@dataclass(frozen=True, kw_only=True)
class SuiteRun:
    """How the suite ended with a bug in place."""

    end: str
    """`finished`, `unnoticed`, `broken`, `timeout` or `died`."""
    letters: str = ""
    """One for each required test; empty unless it finished."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What two runs of the suite say about a bug."""

    outcome: Outcome
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()


_ENDS = {
    "unnoticed": Outcome.UNNOTICED,
    "broken": Outcome.BROKE_SUITE,
    "timeout": Outcome.TIMEOUT,
    "died": Outcome.DIED,
}

RUN_ENDS = frozenset({"finished", *_ENDS})
"""How a `SuiteRun` can end."""


def judge(tests: Sequence[str], runs: Sequence[SuiteRun]) -> Trial:
    """What all runs agree on; a test that ends now this way, now that is in neither list."""
    for run in runs:
        if run.end != "finished":
            return Trial(outcome=_ENDS[run.end])
    seen = [set(letters) for letters in zip(*(run.letters for run in runs), strict=True)]
    failing = tuple(t for t, s in zip(tests, seen, strict=True) if s <= {FAILED, ERROR})
    passing = tuple(t for t, s in zip(tests, seen, strict=True) if s == {PASSED})
    if not failing:
        return Trial(outcome=Outcome.FLAKY)
    if not passing:
        return Trial(outcome=Outcome.BROKE_SUITE)
    return Trial(outcome=Outcome.KEPT, fail_to_pass=failing, pass_to_pass=passing)


def run_limit(suite_s: float, timeout_s: float) -> float:
    """The processor time that a run with a bug may take, in seconds.

    A sixth of the time-out, a half or all of it: the least that is four times the suite's own time.
    What the suite took is not the same twice, and a limit that follows it would decide about slow
    bugs by chance.
    """
    parts = (timeout_s / 6, timeout_s / 2)
    return next((part for part in parts if part >= 4 * suite_s), timeout_s)


def fingerprint_of(path: str, bug: Bug) -> str:
    """The identity of a bug: its file and the syntax, not the layout, before and after."""
    before, after = (ast.dump(ast.parse(text)) for text in (bug.before, bug.after))
    return fingerprint(f"{path}\0{before}", after)


def behaviour_of(candidate: Candidate, trial: Trial, report: str) -> str:
    """The identity of what a bug does: where it is, which tests fail, what the issue shows."""
    parts = (candidate.path, candidate.place.function, *trial.fail_to_pass, report)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def in_turn(candidates: Iterable[Candidate], *, seed: str) -> list[Candidate]:
    """The order of trying: kinds of bugs take turns, and within a kind the functions do.

    Without turns a random order would be mostly of the kinds with most places, and of the longest
    functions.
    """
    chance = random.Random(seed)  # noqa: S311 -- reproducible, not secret
    kinds: defaultdict[str, defaultdict[tuple[str, str], list[Candidate]]]
    kinds = defaultdict(lambda: defaultdict(list))
    for candidate in candidates:
        where = (candidate.path, candidate.place.function)
        kinds[candidate.place.kind][where].append(candidate)
    queues = []
    for _, functions in sorted(kinds.items()):
        groups = [group for _, group in sorted(functions.items(), key=lambda item: item[0])]
        chance.shuffle(groups)
        for group in groups:
            chance.shuffle(group)
        queues.append(deque(_round_robin(groups)))
    return list(_round_robin(queues))


def _round_robin(groups: Iterable[Collection[Candidate]]) -> list[Candidate]:
    waiting = [deque(group) for group in groups]
    order = []
    while waiting:
        order += [group.popleft() for group in waiting]
        waiting = [group for group in waiting if group]
    return order


@dataclass(frozen=True, kw_only=True)
class Known:
    """A task that is there already."""

    ours: bool
    """Whether it is of the same repository and seed: then it counts."""
    behaviour: str


@dataclass
class Selection:
    """The tasks so far, and whether one more may join them.

    Args:
        count: How many to keep.
        per_function: Most of one function; 0: any number.
        per_file: Most of one file; 0: any number.
        known: Tasks that are there already, by fingerprint.
    """

    count: int
    per_function: int = 0
    per_file: int = 0
    known: Mapping[str, Known] = field(default_factory=dict)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    _functions: Counter[tuple[str, str]] = field(default_factory=Counter)
    _files: Counter[str] = field(default_factory=Counter)
    _behaviours: set[str] = field(default_factory=set)
    _to_come: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._behaviours |= {task.behaviour for task in self.known.values()}
        self._to_come |= {name for name, task in self.known.items() if task.ours}

    @property
    def kept(self) -> int:
        """Tasks of this repository and seed, in their turn or not: other options may give none."""
        return self.outcomes[Outcome.KEPT] + len(self._to_come)

    @property
    def complete(self) -> bool:
        """Whether there are as many as were asked for."""
        return self.kept >= self.count

    def is_capped(self, candidate: Candidate) -> bool:
        """Whether its function or file is full. Once full they stay it."""
        where = (candidate.path, candidate.place.function)
        return 0 < self.per_function <= self._functions[where] or (
            0 < self.per_file <= self._files[candidate.path]
        )

    def drop(self, outcome: Outcome) -> None:
        """Counts a candidate that becomes no task."""
        self.outcomes[outcome] += 1

    def keep(self, candidate: Candidate, behaviour: str) -> bool:
        """Takes a candidate as a task, unless one that does the same is there."""
        if behaviour in self._behaviours:
            self.drop(Outcome.DUPLICATE)
            return False
        self._behaviours.add(behaviour)
        self._count(candidate)
        return True

    def keep_known(self, candidate: Candidate, fingerprint: str) -> None:
        """Takes note that it is the turn of a task of ours that is there already."""
        self._to_come.discard(fingerprint)
        self._count(candidate)

    def _count(self, candidate: Candidate) -> None:
        self._functions[candidate.path, candidate.place.function] += 1
        self._files[candidate.path] += 1
        self.outcomes[Outcome.KEPT] += 1
        self.kinds[candidate.place.kind] += 1
