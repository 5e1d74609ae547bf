"""Tasks on demand, and the proof that splits share nothing.

A task is named by its split and a number, and is made when asked for: the same number gives the
same task in every process. Kinds of bugs take turns, so any run of `len(GRAMMAR_KINDS)` tasks has
each once.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Mapping

from swe_eval.generate.issue import write_issue
from swe_eval.generate.names import Split
from swe_eval.generate.repository import (
    BUGS_PER_REPOSITORY,
    HIDDEN_TEST_FILE,
    PlannedBug,
    Repository,
    build_repository,
    hidden_tests,
    visible_test,
)
from swe_eval.generate.task import GeneratedTask, unified_patch

__all__ = ["SplitOverlapError", "check_disjoint", "fingerprint", "make_task", "task_at"]


class SplitOverlapError(ValueError):
    """Two splits share a repository, a function or a bug. A retry cannot help."""


def fingerprint(correct: str, broken: str) -> str:
    """The identity of a bug, from the text before and after it."""
    return hashlib.sha256(f"{correct}\0{broken}".encode()).hexdigest()[:16]


def _readme(repository: Repository) -> str:
    lines = [f"# {repository.name}", "", "Small functions:", ""]
    lines += [
        f"* `{module.name}.py`, tested by `test_{module.name}.py`" for module in repository.modules
    ]
    return "\n".join(lines) + "\n"


def _files(repository: Repository, bug: PlannedBug) -> dict[str, str]:
    files = {"README.md": _readme(repository)}
    for module in repository.modules:
        files[f"{module.name}.py"] = module.text(bug)
        files[f"test_{module.name}.py"] = visible_test(repository, module)
    return files


def make_task(split: Split | str, index: int) -> GeneratedTask:
    """Task number `index` of a split.

    Raises:
        ValueError: `split` is unknown or `index` is negative.
    """
    split = Split(split)
    if index < 0:
        raise ValueError(f"a task's index counts from 0, got {index}")
    repository = build_repository(split, index // BUGS_PER_REPOSITORY)
    bug = repository.bugs[index % BUGS_PER_REPOSITORY]
    rng = random.Random(f"{split.value} issue {index}")  # noqa: S311 - reproducible, not secret
    module = repository.module_of(bug.function)
    spec = next(spec for spec in module.functions if spec.name == bug.function)
    shown = [
        case
        for case in dict(repository.visible_cases)[spec.name]
        if bug.results[case] != spec.expected[case]
    ]
    case = rng.choice(shown)
    hidden, tests = hidden_tests(repository)
    failing = {
        name
        for name, function, number in tests
        if function == spec.name and bug.results[number] != spec.expected[number]
    }
    path = f"{module.name}.py"
    return GeneratedTask(
        task_id=f"{split.value}-{index:05d}-{bug.kind.replace('_', '-')}",
        repository=repository.name,
        split=split,
        kind=bug.kind,
        instruction=write_issue(
            rng,
            function=spec.name,
            call=spec.call(case),
            got=bug.results[case],
            want=spec.expected[case],
        ),
        files=_files(repository, bug),
        hidden_tests={HIDDEN_TEST_FILE: hidden},
        fail_to_pass=tuple(f"{HIDDEN_TEST_FILE}::{t[0]}" for t in tests if t[0] in failing),
        pass_to_pass=tuple(f"{HIDDEN_TEST_FILE}::{t[0]}" for t in tests if t[0] not in failing),
        gold_patch=unified_patch(path, module.text(bug), module.text()),
        module=path,
        function=spec.name,
        line=module.start_line(spec.name) + bug.line - 1,
        fingerprint=fingerprint(spec.source, bug.source),
    )


def task_at(task_id: str) -> GeneratedTask:
    """The task with this id.

    Raises:
        ValueError: No generated task has this id.
    """
    split, _, rest = task_id.partition("-")
    number = rest.partition("-")[0]
    if split not in set(Split) or not number.isdecimal():
        raise ValueError(f"no generated task {task_id!r}; ids look like train-00012-off-by-one")
    task = make_task(Split(split), int(number))
    if task.task_id != task_id:
        raise ValueError(f"no generated task {task_id!r}; number {number} is {task.task_id!r}")
    return task


def _function_names(task: GeneratedTask) -> set[str]:
    return {
        line[4:].partition("(")[0]
        for path, text in task.files.items()
        if path.endswith(".py") and not path.rpartition("/")[2].startswith("test_")
        for line in map(str.strip, text.splitlines())
        if line.startswith("def ") and not line.startswith("def __")
    }


_COMPARED: Mapping[str, Callable[[GeneratedTask], set[str]]] = {
    "task": lambda task: {task.task_id},
    "repository": lambda task: {task.repository},
    "function": _function_names,
    "bug": lambda task: {task.fingerprint},
}


def check_disjoint(parts: Mapping[str, Iterable[GeneratedTask]]) -> dict[str, dict[str, int]]:
    """Prove that no two parts share a task, a repository, a function name or a bug.

    Every function of a repository counts, not only the broken one; names that the language gives,
    such as `__init__`, do not.

    Args:
        parts: Tasks by the name of the part they belong to.

    Returns:
        For each part the number of distinct tasks, repositories, functions and bugs compared.

    Raises:
        SplitOverlapError: Two parts share something; the message names it.
    """
    seen = {
        name: {what: set[str]().union(*map(of, tasks)) for what, of in _COMPARED.items()}
        for name, tasks in ((name, list(tasks)) for name, tasks in parts.items())
    }
    for (first, left), (second, right) in itertools.combinations(seen.items(), 2):
        for what in _COMPARED:
            if shared := sorted(left[what] & right[what]):
                raise SplitOverlapError(
                    f"{first} and {second} share {len(shared)} {what} name(s) or digest(s), "
                    f"such as {shared[0]!r}; draw them from splits of their own"
                )
    return {name: {what: len(of) for what, of in sets.items()} for name, sets in seen.items()}
