"""What to make of a repository, and what came of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swe_eval.generate.mutate import KINDS

__all__ = ["MakeOptions", "Summary"]


@dataclass(frozen=True, kw_only=True)
class MakeOptions:
    """What to make."""

    count: int = 100
    """Tasks of this repository and seed in all, those counted that are there already."""
    seed: int = 0
    """Another seed tries bugs in another order."""
    kinds: Sequence[str] = KINDS
    include: Sequence[str] = ()
    """Globs of files for bugs; empty: every file that is no test."""
    exclude: Sequence[str] = ()
    """Globs of files without bugs, and of tests that are not run."""
    per_function: int = 3
    """Most tasks of one function; 0: any number."""
    per_file: int = 0
    """Most tasks of one file; 0: any number."""
    timeout_s: float = 60.0
    """Longest time of one run of the suite, here and in grading."""
    jobs: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Sandboxes at once; the tasks don't depend on it."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What became of the candidates."""

    repository: str
    tests: int
    """Tests that every task requires to pass, or to fail without the repair."""
    tests_left_out: Mapping[str, int]
    candidates: int
    """Bugs that could be made where a test reaches."""
    tried: int
    """Those that were looked at until there were enough tasks."""
    kept: int
    new: int
    """Of those kept, the ones that were not there before."""
    outcomes: Mapping[str, int]
    kinds: Mapping[str, int]
