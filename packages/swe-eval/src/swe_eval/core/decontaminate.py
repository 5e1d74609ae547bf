"""Do two splits of tasks share anything that training must not have seen?

Repositories are compared by name without what mirrors, pins and owners change, by the names they
had before, and by their first commit. Texts and patches count as equal when a large part of the
shorter one is in the other: its runs of words, or its changed lines.
"""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

_WORDS_A_RUN = 6
_MIN_RUNS = 8
_MIN_PATCH_LETTERS = 40


class OverlapKind(StrEnum):
    """What two splits share."""

    REPOSITORY = "repository"
    FUNCTION = "function"
    FORK = "fork"
    """A repository of the same name and another owner."""
    FIRST_COMMIT = "first_commit"
    TEXT = "text"
    PATCH = "patch"


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFacts:
    """What a task can be known by."""

    task_id: str
    repository: str
    functions: frozenset[str] = frozenset()
    """Names that its files define."""
    first_commit: str = ""
    """Hash of the repository's first commit, where it is known."""
    text: str = ""
    """The problem statement."""
    patch: str = ""
    """The known solution, as a diff."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """Something found in both splits, with one witness from each."""

    kind: OverlapKind
    name: str
    """The name that is shared, or how much of the smaller text or patch is."""
    training_task: str
    heldout_task: str

    def __str__(self) -> str:
        """For people: both tasks and what they share."""
        return f"{self.training_task} and {self.heldout_task} share {self.kind} {self.name}"


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
    """``owner/name``, or ``name``, without what a copy changes.

    That is case, host, ``.git``, ``.<commit>`` and the owner of a mirror called ``owner__name``.
    """
    key = repository.strip().lower().rstrip("/").removesuffix(".git").replace(":", "/")
    stem, dot, tail = key.rpartition(".")
    if dot and len(tail) >= 7 and all(c in "0123456789abcdef" for c in tail):
        key = stem
    return "/".join(key.replace("__", "/").split("/")[-2:])


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


def contamination(
    training: Iterable[TaskFacts],
    heldout: Sequence[TaskFacts],
    *,
    aliases: Mapping[str, str] | None = None,
    text_share: float = 0.5,
    patch_share: float = 0.8,
) -> list[Overlap]:
    """The training tasks that share a repository, a text or a patch with a held-out one.

    Args:
        training: Tasks to be trained on.
        heldout: Tasks of evaluation sets.
        aliases: Repositories by other names of theirs, from before a renaming or of a fork.
        text_share: Share of a text's runs of words in another that makes them equal, in 0..1.
        patch_share: The same of a patch's changed lines.

    Returns:
        In the order of the training tasks, each with one witness for each kind.
    """
    renamed = {repository_key(old): repository_key(new) for old, new in (aliases or {}).items()}

    def home(facts: TaskFacts) -> str:
        key = repository_key(facts.repository)
        return renamed.get(key, key)

    exact: list[tuple[OverlapKind, Callable[[TaskFacts], str], dict[str, str]]] = [
        (OverlapKind.REPOSITORY, home, {}),
        (OverlapKind.FORK, lambda facts: home(facts).rpartition("/")[2], {}),
        (OverlapKind.FIRST_COMMIT, lambda facts: facts.first_commit.lower(), {}),
    ]
    for _, name_of, known in exact:
        for facts in heldout:
            known.setdefault(name_of(facts), facts.task_id)
        known.pop("", None)
    alike = [
        (OverlapKind.TEXT, _Index(heldout, lambda f: _runs_of_words(f.text), text_share)),
        (OverlapKind.PATCH, _Index(heldout, lambda f: _changed_lines(f.patch), patch_share)),
    ]
    found: list[Overlap] = []
    for facts in training:
        same_repository = home(facts) in exact[0][2]
        hits = [
            (kind, name_of(facts), known[name_of(facts)])
            for kind, name_of, known in exact
            if name_of(facts) in known and not (kind is OverlapKind.FORK and same_repository)
        ]
        for kind, index in alike:
            nearest = index.nearest(facts)
            if nearest is not None:
                hits.append((kind, f"{nearest[1]:.0%}", nearest[0]))
        found += [
            Overlap(kind=kind, name=name, training_task=facts.task_id, heldout_task=witness)
            for kind, name, witness in hits
        ]
    return found


class _Index:
    """Finds the held-out task that shares most of its pieces with another."""

    def __init__(
        self,
        heldout: Sequence[TaskFacts],
        pieces_of: Callable[[TaskFacts], frozenset[str]],
        share: float,
    ) -> None:
        self._pieces_of = pieces_of
        self._share = share
        self._sizes: list[int] = []
        self._ids = [facts.task_id for facts in heldout]
        self._with: dict[str, list[int]] = {}
        for number, facts in enumerate(heldout):
            pieces = pieces_of(facts)
            self._sizes.append(len(pieces))
            for piece in pieces:
                self._with.setdefault(piece, []).append(number)

    def nearest(self, facts: TaskFacts) -> tuple[str, float] | None:
        """Its id and the share of the smaller one's pieces, if that is large enough."""
        pieces = self._pieces_of(facts)
        common = Counter(number for piece in pieces for number in self._with.get(piece, ()))
        shares = [(n / min(len(pieces), self._sizes[i]), -i) for i, n in common.items()]
        share, number = max(shares, default=(0.0, 0))
        return (self._ids[-number], share) if shares and share >= self._share else None


def _runs_of_words(text: str) -> frozenset[str]:
    words = re.findall(r"\w+", text.lower())
    runs = {" ".join(words[i : i + _WORDS_A_RUN]) for i in range(len(words) - _WORDS_A_RUN + 1)}
    # A few words in common are no copy.
    return frozenset(runs) if len(runs) >= _MIN_RUNS else frozenset()


def _changed_lines(patch: str) -> frozenset[str]:
    """Added and removed lines without spaces, whatever their file, place and direction."""
    lines = {
        re.sub(r"\s+", "", line[1:])
        for line in patch.splitlines()
        if line.startswith(("+", "-")) and not line.startswith(("+++ ", "--- "))
    }
    lines = {line for line in lines if sum(c.isalnum() for c in line) > 2}
    return frozenset(lines) if sum(map(len, lines)) >= _MIN_PATCH_LETTERS else frozenset()
