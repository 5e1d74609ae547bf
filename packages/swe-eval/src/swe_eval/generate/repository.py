"""Generated repositories: modules of small functions, their tests, their planned bugs."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swe_eval.generate.grammar import (
    TEMPLATES,
    FunctionSpec,
    Template,
    draw_function,
    evaluate_call,
)
from swe_eval.generate.mutate import Mutation, mutate
from swe_eval.generate.names import Split, draw_repository_name

__all__ = [
    "BUGS_PER_REPOSITORY",
    "GRAMMAR_KINDS",
    "HIDDEN_TEST_FILE",
    "MODULE_NAMES",
    "PlannedBug",
    "Repository",
    "SourceModule",
    "build_repository",
    "hidden_tests",
    "templates_for",
    "visible_test",
]

MODULE_NAMES: tuple[str, ...] = (
    "bank",
    "calc",
    "core",
    "data",
    "game",
    "geo",
    "grid",
    "lab",
    "mix",
    "plan",
    "pool",
    "rate",
    "shop",
    "stats",
    "tax",
    "tool",
)

GRAMMAR_KINDS: tuple[str, ...] = (
    "operator_change",
    "comparison_change",
    "operand_swap",
    "constant_change",
    "break_chain",
    "invert_condition",
    "boolean_change",
    "wrong_variable",
    "builtin_swap",
    "off_by_one",
    "wrong_initial_value",
    "remove_call",
    "slice_flip",
)
"""Kinds that tasks of the generated splits use in turn. Replacing one line repairs each of them."""

BUGS_PER_REPOSITORY = 3
"""Every generated repository serves this many tasks, each with one bug of its own."""

HIDDEN_TEST_FILE = "test_hidden.py"

_VISIBLE_CASES = 2


@dataclass(frozen=True)
class PlannedBug:
    """A bug that some test of its function notices."""

    kind: str
    function: str
    source: str
    """The function with the bug in."""
    line: int
    """Line of the bug within the function, from 1."""
    results: tuple[str, ...]
    """What each case of the function gives with the bug in."""


@dataclass(frozen=True)
class SourceModule:
    """One file of functions."""

    name: str
    functions: tuple[FunctionSpec, ...]

    def text(self, replaced: PlannedBug | None = None) -> str:
        """The file, with one function in its broken form if asked."""
        return "\n\n".join(
            replaced.source if replaced and replaced.function == spec.name else spec.source
            for spec in self.functions
        )

    def start_line(self, function: str) -> int:
        """The line on which `function` is defined, from 1."""
        line = 1
        for spec in self.functions:
            if spec.name == function:
                return line
            line += spec.source.count("\n") + 2
        raise KeyError(function)


@dataclass(frozen=True)
class Repository:
    """A repository without bugs, and the bugs planned for its tasks."""

    name: str
    split: Split
    modules: tuple[SourceModule, ...]
    bugs: tuple[PlannedBug, ...]
    visible_cases: tuple[tuple[str, tuple[int, ...]], ...]
    """For each function the cases that the visible test runs."""

    def module_of(self, function: str) -> SourceModule:
        """The module that defines `function`."""
        for module in self.modules:
            if any(spec.name == function for spec in module.functions):
                return module
        raise KeyError(function)

    def functions(self) -> Iterator[FunctionSpec]:
        """All functions, module by module."""
        for module in self.modules:
            yield from module.functions


@functools.cache
def _templates_by_kind() -> dict[str, tuple[Template, ...]]:
    found: dict[str, list[Template]] = {kind: [] for kind in GRAMMAR_KINDS}
    for template in TEMPLATES:
        rng = random.Random(f"probe {template.verb}")  # noqa: S311 - reproducible, not secret
        possible: set[str] = set()
        for _ in range(3):
            spec = draw_function(rng, Split.PRETRAIN, template)
            missing = [kind for kind in GRAMMAR_KINDS if kind not in possible]
            possible.update(bug.kind for bug in _noticed_bugs(spec, missing))
        for kind in possible:
            found[kind].append(template)
    return {kind: tuple(templates) for kind, templates in found.items()}


def templates_for(kind: str) -> tuple[Template, ...]:
    """Templates whose instances can have a noticed bug of `kind`."""
    return _templates_by_kind()[kind]


def _broken(spec: FunctionSpec, mutation: Mutation) -> PlannedBug | None:
    results = evaluate_call(mutation.source, spec.name, spec.arguments)
    if results == spec.expected or max(map(len, results)) > 24:
        return None
    return PlannedBug(mutation.kind, spec.name, mutation.source, mutation.line, results)


def _noticed_bugs(spec: FunctionSpec, kinds: Sequence[str]) -> list[PlannedBug]:
    """Bugs in one of the function's first three body lines that a case notices."""
    mutations = mutate(spec.source, kinds=kinds)
    near = (m for m in mutations if m.single_line and 2 <= m.line <= 4)
    return [bug for bug in (_broken(spec, mutation) for mutation in near) if bug is not None]


def _plan_bug(rng: random.Random, split: Split, kind: str) -> tuple[FunctionSpec, PlannedBug]:
    while True:
        spec = draw_function(rng, split, rng.choice(templates_for(kind)))
        bugs = _noticed_bugs(spec, (kind,))
        if bugs:
            return spec, rng.choice(bugs)


def _pick_visible(
    rng: random.Random, spec: FunctionSpec, bug: PlannedBug | None
) -> tuple[int, ...]:
    """Case numbers for the visible test; at least one of them notices the planned bug."""
    cases = list(range(len(spec.arguments)))
    if bug is None:
        return tuple(sorted(rng.sample(cases, _VISIBLE_CASES)))
    failing = [i for i in cases if bug.results[i] != spec.expected[i]]
    # Edge cases come first: someone who reports a wrong limit reports it at the limit.
    first = failing[0] if spec.constant is not None else rng.choice(failing)
    others = rng.sample([i for i in cases if i != first], _VISIBLE_CASES - 1)
    return tuple(sorted([first, *others]))


def _deal(
    rng: random.Random, functions: list[FunctionSpec], names: list[str]
) -> tuple[SourceModule, ...]:
    """Functions in random order, spread over the modules as evenly as it goes."""
    rng.shuffle(functions)
    return tuple(
        SourceModule(name, tuple(functions[i :: len(names)])) for i, name in enumerate(names)
    )


@functools.lru_cache(maxsize=256)
def build_repository(split: Split, index: int) -> Repository:
    """Repository number `index` of a split: the same value in every process, at any time."""
    rng = random.Random(f"{split.value} repository {index}")  # noqa: S311 - reproducible
    planned: list[tuple[FunctionSpec, PlannedBug]] = []
    taken: set[str] = set()
    for slot in range(BUGS_PER_REPOSITORY):
        kind = GRAMMAR_KINDS[(index * BUGS_PER_REPOSITORY + slot) % len(GRAMMAR_KINDS)]
        spec, bug = _plan_bug(rng, split, kind)
        while spec.name in taken:
            spec, bug = _plan_bug(rng, split, kind)
        taken.add(spec.name)
        planned.append((spec, bug))
    functions = [spec for spec, _ in planned]
    for _ in range(rng.randint(1, 4)):
        extra = draw_function(rng, split, rng.choice(TEMPLATES))
        if extra.name not in taken:
            taken.add(extra.name)
            functions.append(extra)
    names = rng.sample(MODULE_NAMES, rng.randint(1, 3))
    modules = _deal(rng, functions, names)
    bugs = {bug.function: bug for _, bug in planned}
    visible = tuple(
        (spec.name, _pick_visible(rng, spec, bugs.get(spec.name)))
        for module in modules
        for spec in module.functions
    )
    return Repository(
        name=draw_repository_name(rng, split),
        split=split,
        modules=modules,
        bugs=tuple(bug for _, bug in planned),
        visible_cases=visible,
    )


_VISIBLE_TEST = """\
CASES = [
{cases}
]


def first_failure():
    import {module}

    for name, arguments, expected in CASES:
        call = f"{{name}}({{', '.join(map(repr, arguments))}})"
        try:
            got = getattr({module}, name)(*arguments)
        except Exception as error:
            return f"{{call}} raises {{type(error).__name__}}, expected {{expected!r}}"
        if repr(got) != repr(expected):
            return f"{{call}} gives {{got!r}}, expected {{expected!r}}"
    return None


def test_cases():
    assert first_failure() is None


if __name__ == "__main__":
    try:
        failure = first_failure()
    except Exception as error:
        failure = f"{{type(error).__name__}}: {{error}}"
    print(failure or "ok")
    raise SystemExit(failure is not None)
"""


def visible_test(repository: Repository, module: SourceModule) -> str:
    """The test file that the agent sees: runs under pytest, or as a script that prints one line."""
    chosen = dict(repository.visible_cases)
    cases = [
        f'    ("{spec.name}", {spec.arguments[i]!r}, {spec.expected[i]}),'
        for spec in module.functions
        for i in chosen[spec.name]
    ]
    return _VISIBLE_TEST.format(module=module.name, cases="\n".join(cases))


def _assertion(call: str, expected: str) -> str:
    if expected in {"True", "False", "None"}:
        return f"assert {call} is {expected}"
    return f"assert {call} == {expected}"


def hidden_tests(repository: Repository) -> tuple[str, tuple[tuple[str, str, int], ...]]:
    """The hidden test file of the repository.

    Returns:
        Its text, and for each test `(test name, function, case number)`.
    """
    imports = [
        f"from {module.name} import {', '.join(sorted(spec.name for spec in module.functions))}"
        for module in sorted(repository.modules, key=lambda module: module.name)
    ]
    tests, index = [], []
    for spec in repository.functions():
        for case in range(len(spec.arguments)):
            name = f"test_{spec.name}_{case}"
            assertion = _assertion(spec.call(case), spec.expected[case])
            tests.append(f"def {name}():\n    {assertion}\n")
            index.append((name, spec.name, case))
    return "\n".join(imports) + "\n\n\n" + "\n\n".join(tests), tuple(index)
