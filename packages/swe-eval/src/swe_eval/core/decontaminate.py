"""Do two splits of tasks share anything that training must not have seen?"""

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class OverlapKind(StrEnum):
    """What two splits share."""

    REPOSITORY = "repository"
    FUNCTION = "function"


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFacts:
    """The names a task reveals: its repository and the functions its files define."""

    task_id: str
    repository: str
    functions: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """A name found in both splits, with one witness from each."""

    kind: OverlapKind
    name: str
    training_task: str
    heldout_task: str


def defined_functions(files: Mapping[str, str]) -> frozenset[str]:
    """Names of the functions, methods and classes that Python files define, but for tests.

    Files that are not valid Python define nothing. Dunder names and ``test_*`` say nothing about a
    repository and are skipped.
    """
    names: set[str] = set()
    for path, source in files.items():
        if not path.endswith(".py"):
            continue
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
    return frozenset(n for n in names if not n.startswith(("__", "test_", "Test")))


def repository_key(repository: str) -> str:
    """A repository name without what a copy changes: case, ``.git`` and ``.<commit>``."""
    key = repository.strip().lower().removesuffix(".git").rstrip("/")
    stem, dot, tail = key.rpartition(".")
    if dot and len(tail) >= 7 and all(c in "0123456789abcdef" for c in tail):
        key = stem
    return key.replace("__", "/")


def overlaps(training: Iterable[TaskFacts], heldout: Iterable[TaskFacts]) -> list[Overlap]:
    """Every repository and function name that both splits contain, sorted; empty when disjoint."""
    repositories: dict[str, str] = {}
    functions: dict[str, str] = {}
    for facts in training:
        repositories.setdefault(repository_key(facts.repository), facts.task_id)
        for name in facts.functions:
            functions.setdefault(name, facts.task_id)
    found: dict[tuple[OverlapKind, str], Overlap] = {}
    for facts in heldout:
        key = repository_key(facts.repository)
        shared = [(OverlapKind.REPOSITORY, key, repositories[key])] if key in repositories else []
        shared += [
            (OverlapKind.FUNCTION, name, functions[name])
            for name in facts.functions
            if name in functions
        ]
        for kind, name, witness in shared:
            found.setdefault(
                (kind, name),
                Overlap(kind=kind, name=name, training_task=witness, heldout_task=facts.task_id),
            )
    return [found[key] for key in sorted(found)]
