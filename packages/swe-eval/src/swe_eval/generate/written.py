"""Tasks from repositories written by hand: classes, exceptions, several lines a bug.

They are few and their words are not in a closed alphabet, so they serve larger models and tests of
the system; the generated splits serve training at scale.
"""

from __future__ import annotations

import ast
import functools
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources

from swe_eval.generate.execute import StepBudgetExceededError, load_modules, run_tests
from swe_eval.generate.issue import TITLES
from swe_eval.generate.mutate import KINDS, Mutation, mutate
from swe_eval.generate.names import Split
from swe_eval.generate.select import fingerprint
from swe_eval.generate.task import GeneratedTask, unified_patch

__all__ = ["WrittenRepository", "load_written_repositories", "tasks_from_repository"]

_OWNERS: Mapping[str, Split] = {
    "inventory": Split.HELDOUT,
    "ledger": Split.TRAIN,
    "textkit": Split.TRAIN,
    "timetable": Split.HELDOUT,
}


@dataclass(frozen=True)
class WrittenRepository:
    """A repository without bugs whose tests all pass."""

    name: str
    split: Split
    files: Mapping[str, str]
    tests: Mapping[str, str]
    """Hidden tests; none of them is among `files`."""


@functools.cache
def load_written_repositories() -> tuple[WrittenRepository, ...]:
    """The repositories that ship with this package, by name."""
    root = resources.files("swe_eval.generate") / "repos"
    repositories = []
    for name, split in sorted(_OWNERS.items()):
        files: dict[str, str] = {"README.md": f"# {name}\n"}
        tests: dict[str, str] = {}
        for entry in sorted((root / name).iterdir(), key=lambda entry: entry.name):
            path = entry.name.removesuffix(".txt")
            (tests if path.startswith("test_") else files)[path] = entry.read_text("utf-8")
        repositories.append(WrittenRepository(name, split, files, tests))
    return tuple(repositories)


def _first_comparison(test: str, name: str) -> tuple[str, str] | None:
    """The first `assert <call> == <value>` of a test, as two texts."""
    for node in ast.walk(ast.parse(test)):
        if not (isinstance(node, ast.FunctionDef) and node.name == name):
            continue
        for statement in node.body:
            match statement:
                case ast.Assert(
                    test=ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right])
                ):
                    return ast.unparse(left), ast.unparse(right)
    return None


def _outcome(files: Mapping[str, str], module: str, call: str) -> str:
    """What `call` gives in a repository: its `repr`, an exception, or no end."""
    probe = f"from {module} import *\nresult = repr({call})\n"
    try:
        return f"gives `{load_modules({**files, 'probe.py': probe})['probe'].result}`"
    except StepBudgetExceededError:
        return "never ends"
    except Exception as error:
        return f"raises {type(error).__name__}"


def _observed(
    correct: Mapping[str, str], broken: Mapping[str, str], tests: Mapping[str, str], test_id: str
) -> str | None:
    """What the failing test's first comparison gives now, if it stands on its own."""
    path, _, name = test_id.partition("::")
    found = _first_comparison(tests[path], name)
    if found is None:
        return None
    call, want = found
    module = path.removesuffix(".py")
    wanted = _outcome({**correct, **tests}, module, want)
    before = _outcome({**correct, **tests}, module, call)
    after = _outcome({**broken, **tests}, module, call)
    if before != wanted or after == before:
        return None
    return f"`{call}` {after}, expected `{want}`."


def _report(
    rng: random.Random,
    repository: WrittenRepository,
    broken: Mapping[str, str],
    function: str,
    failing: str,
) -> str:
    title = rng.choice(TITLES).format(function=f"`{function}`")
    seen = _observed(repository.files, broken, repository.tests, failing)
    words = failing.partition("::test_")[2].replace("_", " ")
    return f"{title}\n\n{seen or f'This no longer works: {words}.'}"


def _task(
    repository: WrittenRepository,
    path: str,
    mutation: Mutation,
    number: int,
    failing: list[str],
    passing: list[str],
) -> GeneratedTask:
    rng = random.Random(f"{repository.name} issue {number}")  # noqa: S311 - reproducible
    files = {**repository.files, path: mutation.source}
    correct = repository.files[path]
    return GeneratedTask(
        task_id=f"{repository.name}-{number:04d}-{mutation.kind.replace('_', '-')}",
        repository=repository.name,
        split=repository.split,
        kind=mutation.kind,
        instruction=_report(rng, repository, files, mutation.function, rng.choice(sorted(failing))),
        files=files,
        hidden_tests=dict(repository.tests),
        fail_to_pass=tuple(sorted(failing)),
        pass_to_pass=tuple(sorted(passing)),
        gold_patch=unified_patch(path, mutation.source, correct),
        module=path,
        function=mutation.function,
        line=mutation.line,
        fingerprint=fingerprint(correct, mutation.source),
    )


def tasks_from_repository(
    repository: WrittenRepository, *, kinds: Collection[str] = KINDS
) -> Iterator[GeneratedTask]:
    """Every bug of the given kinds that at least one test of the repository notices.

    The tests run in this process; see `swe_eval.generate.execute`.

    Raises:
        ValueError: A test fails without any bug.
    """
    before = run_tests(repository.files, repository.tests)
    if broken := sorted(name for name, result in before.items() if not result.passed):
        raise ValueError(f"repository {repository.name} fails its own tests: {', '.join(broken)}")
    number = 0
    for path, text in sorted(repository.files.items()):
        if not path.endswith(".py"):
            continue
        for mutation in mutate(text, kinds=kinds):
            after = run_tests({**repository.files, path: mutation.source}, repository.tests)
            failing = [name for name, result in after.items() if not result.passed]
            if not failing or not mutation.function:
                continue
            passing = [name for name, result in after.items() if result.passed]
            yield _task(repository, path, mutation, number, failing, passing)
            number += 1
