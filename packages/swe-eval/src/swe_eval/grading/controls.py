"""Negative controls: hidden tests altered so that a right program fails them.

The tested code shares a process with the tests and can do there whatever a test can: report, patch
the runner, read the expected value out of the caller's frame, return objects that equal everything.
None of that needs the right answer. So a run in which every required test passed is followed by a
second one, in another sandbox, in which tests have one literal or one condition of an assertion
changed (`== 23` to `== 28`, `is True` to `is False`, `in` to `not in`): all fail-to-pass tests and,
chosen at random, half of the others. A right program fails exactly those. Code that passes by any
way but computing the answer can't tell which they are, for it sees one of the two runs at a time,
and both look like tests.
"""

import ast
import random
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from swe_eval.core.verdict import GradeReason, Judgement, TestResult, TestStatus, Verdict

_TRIES = 20
_SWAPPED: Mapping[type[ast.cmpop], str] = {
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Lt: ">=",
    ast.GtE: "<",
    ast.Gt: "<=",
    ast.LtE: ">",
}
_SWAPPED_CALLS = {
    "assertTrue": "assertFalse",
    "assertFalse": "assertTrue",
    "assertIn": "assertNotIn",
    "assertNotIn": "assertIn",
}
_EQUAL_CALLS = {"assertEqual", "assertIs"}
# Marks with which a test that fails may count as passed, or passing may mean nothing.
_UNSURE = ("xfail", "expectedFailure", "flaky", "skip")
_ASSERTION = re.compile(r"(\s*)((?:assert|self\.assert).*)")
_ADDED_ASSERTION = re.compile(r"(\+\s*)((?:assert|self\.assert).*)")
_DIGITS = "0123456789"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """Altered test files, and the required tests that a right program fails in them."""

    files: Mapping[str, str]
    altered: frozenset[str]

    def wrong(self, tests: Iterable[TestResult]) -> frozenset[str]:
        """Required tests that did not end as they do with a right program."""
        failed = {TestStatus.FAILED, TestStatus.ERROR}
        return frozenset(
            test.name
            for test in tests
            if test.required
            and test.status not in (failed if test.name in self.altered else {TestStatus.PASSED})
        )

    def judge(self, seen: Judgement) -> Judgement:
        """From the judgement of the altered tests to one of the diff."""
        wrong = self.wrong(seen.tests)
        if seen.reason in {GradeReason.NONE, GradeReason.TESTS_FAILED, GradeReason.TESTS_MISSING}:
            if not wrong:
                return replace(seen, verdict=Verdict.SOLVED, reason=GradeReason.NONE)
            reason = GradeReason.CONTROL_PASSED if wrong & self.altered else seen.reason
            return replace(seen, verdict=Verdict.UNSOLVED, reason=reason, needs_reference=True)
        return replace(seen, needs_reference=True)


class LineControl(Control):
    """Texts altered line by line, of which can't be told which tests they concern.

    A run with the reference solution tells (`learned`).
    """

    def learned(self, reference: Judgement) -> "LineControl | None":
        """The control with the tests that the reference fails; None if it fails none."""
        if reference.verdict is Verdict.SOLVED:
            return None
        failed = (t.name for t in reference.tests if t.required and t.status is TestStatus.FAILED)
        return replace(self, altered=frozenset(failed))

    def wrong(self, tests: Iterable[TestResult]) -> frozenset[str]:
        """Tests that passed and should not have."""
        passed = (test.name for test in tests if test.status is TestStatus.PASSED)
        return self.altered.intersection(passed)

    def judge(self, seen: Judgement) -> Judgement:
        """Solved, unless altered tests were passed."""
        if seen.verdict is Verdict.SOLVED or self.wrong(seen.tests):
            return Judgement(verdict=Verdict.UNSOLVED, reason=GradeReason.CONTROL_PASSED)
        return Judgement(verdict=Verdict.SOLVED, reason=GradeReason.NONE)


@dataclass(frozen=True, slots=True)
class _Edit:
    """Bytes from `start` to `end` of a source become `text`."""

    start: int
    end: int
    text: bytes


def make_control(
    files: Mapping[str, str],
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
    *,
    seed: int,
    blind: Collection[str] = (),
) -> Control | None:
    """Alters all fail-to-pass tests that can be altered and half of the others, at least one.

    Only assertions are altered that a passing test has certainly met: those that stand in the
    function itself, in one without `return`.

    Args:
        files: Hidden test files, path to source.
        fail_to_pass: Ids, `path::test`, `path::Class::test` or either with `[parameters]`.
        pass_to_pass: The other required tests.
        seed: Other seeds alter other tests in other ways. Has to be a secret.
        blind: Tests that are known not to notice being altered.

    Returns:
        None when no required test can be altered.
    """
    chance = random.Random(seed)  # noqa: S311 -- a function of a secret seed
    functions: dict[str, list[str]] = {}
    for test in dict.fromkeys((*fail_to_pass, *pass_to_pass)):
        functions.setdefault(test.partition("[")[0], []).append(test)
    edits = {
        function: edit
        for path, source in files.items()
        for function, edit in _edits_of(path, source, functions, chance).items()
        if not set(functions[function]).intersection(blind)
    }
    if not edits:
        return None
    failing = {test.partition("[")[0] for test in fail_to_pass}
    chosen = [f for f in edits if f in failing or chance.random() < 0.5]
    chosen = chosen or [chance.choice(sorted(edits))]
    return Control(
        files={
            path: _apply(source, [edits[f] for f in chosen if f.partition("::")[0] == path])
            for path, source in files.items()
        },
        altered=frozenset(test for function in chosen for test in functions[function]),
    )


def make_line_control(files: Mapping[str, str], *, seed: int) -> LineControl | None:
    """Alters assertions that fill a line each: in scripts that hold tests, or in test files.

    Of a text that holds a diff only the added lines are altered. None when there are none.
    """
    chance = random.Random(seed)  # noqa: S311 -- a function of a secret seed
    found: dict[tuple[str, int], str] = {}
    lines = {path: text.split("\n") for path, text in files.items()}
    for path, text in files.items():
        pattern = _ADDED_ASSERTION if "diff --git " in text else _ASSERTION
        for number, line in enumerate(lines[path]):
            match = pattern.fullmatch(line)
            edits = [] if match is None else _line_edits(match[2], chance)
            if match is not None and edits:
                found[path, number] = match[1] + _apply(match[2], [chance.choice(edits)])
    if not found:
        return None
    for (path, number), line in found.items():
        lines[path][number] = line
    altered = {path: "\n".join(parts) for path, parts in lines.items()}
    return LineControl(files=altered, altered=frozenset())


def _line_edits(line: str, chance: random.Random) -> list[_Edit]:
    try:
        statements = ast.parse(line).body
    except (SyntaxError, ValueError):
        return []
    return [edit for s in statements for edit in _edits(s, _Text(line), chance)]


def _edits_of(
    path: str, source: str, wanted: Collection[str], chance: random.Random
) -> dict[str, _Edit]:
    """One edit for each wanted function of a file that can be altered."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return {}
    if any(mark in ast.unparse(n) for n in tree.body if _is_mark(n) for mark in _UNSURE):
        return {}
    text = _Text(source)
    edits: dict[str, _Edit] = {}
    for name, function in _functions(tree.body, path):
        edits.pop(name, None)  # a later definition replaces an earlier one
        if name not in wanted or not _is_plain(function):
            continue
        found = [edit for s in function.body for edit in _edits(s, text, chance)]
        if found:
            edits[name] = chance.choice(found)
    return edits


def _is_mark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])


def _functions(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield f"{prefix}::{node.name}", node
        elif isinstance(node, ast.ClassDef) and not _marked(node):
            yield from _functions(node.body, f"{prefix}::{node.name}")


def _marked(node: ast.FunctionDef | ast.ClassDef) -> bool:
    return any(mark in ast.unparse(d) for d in node.decorator_list for mark in _UNSURE)


def _is_plain(function: ast.FunctionDef) -> bool:
    """Whether a call that ends well has met every statement of the body."""
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom):
            return False
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)
    return not _marked(function)


class _Text:
    """A source and where its nodes lie in it."""

    def __init__(self, source: str) -> None:
        self.source = source.encode()
        self._starts = [0]
        for line in self.source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def start(self, node: ast.expr) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.expr) -> str:
        return self.source[self.start(node) : self.end(node)].decode()


def _edits(statement: ast.stmt, text: _Text, chance: random.Random) -> Iterator[_Edit]:
    """Ways to turn an assertion that holds into one that does not."""
    if isinstance(statement, ast.Assert) and statement.msg is None:
        yield from _condition(statement.test, text, chance)
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        yield from _unittest_call(statement.value, text, chance)


def _condition(test: ast.expr, text: _Text, chance: random.Random) -> Iterator[_Edit]:
    start = text.start(test)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield _Edit(start, text.start(test.operand), b"")
    elif isinstance(test, ast.Call | ast.Name | ast.Attribute | ast.Subscript):
        yield _Edit(start, start, b"not ")
    elif isinstance(test, ast.Compare) and len(test.ops) == 1:
        operator, left, right = test.ops[0], test.left, test.comparators[0]
        if isinstance(operator, ast.Eq | ast.Is):
            yield from _literals((left, right), text, chance)
        elif type(operator) in _SWAPPED:
            between = text.source[text.end(left) : text.start(right)]
            # Not with brackets or comments between the sides.
            if between.replace(b" ", b"") in {b"in", b"notin", b"<", b">=", b">", b"<="}:
                swapped = f" {_SWAPPED[type(operator)]} ".encode()
                yield _Edit(text.end(left), text.start(right), swapped)


def _unittest_call(call: ast.Call, text: _Text, chance: random.Random) -> Iterator[_Edit]:
    function = call.func
    if not isinstance(function, ast.Attribute) or call.keywords:
        return
    count = 1 if function.attr in {"assertTrue", "assertFalse"} else 2
    if not isinstance(function.value, ast.Name) or len(call.args) != count:
        return
    if function.attr in _EQUAL_CALLS:
        yield from _literals(call.args, text, chance)
    elif function.attr in _SWAPPED_CALLS:
        end = text.end(function)
        swapped = _SWAPPED_CALLS[function.attr].encode()
        yield _Edit(end - len(function.attr), end, swapped)


def _literals(sides: Sequence[ast.expr], text: _Text, chance: random.Random) -> Iterator[_Edit]:
    for leaf in (leaf for side in sides for leaf in _leaves(side)):
        old = text.of(leaf)
        new = _other_literal(old, chance)
        if new is not None:
            yield _Edit(text.start(leaf), text.end(leaf), new.encode())


def _leaves(node: ast.expr) -> Iterator[ast.Constant]:
    """Constants whose change changes the value of the whole."""
    if isinstance(node, ast.Constant):
        yield node
    elif isinstance(node, ast.List | ast.Tuple):
        for element in node.elts:
            yield from _leaves(element)
    elif isinstance(node, ast.Dict) and None not in node.keys:
        for value in node.values:
            yield from _leaves(value)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield from _leaves(node.operand)


def _other_literal(old: str, chance: random.Random) -> str | None:
    """The literal with one digit or letter changed, so that it looks as natural as before."""
    if old in {"True", "False"}:
        return "False" if old == "True" else "True"
    places = [i for i, c in enumerate(old) if c.isascii() and c.isalnum()]
    value = _value(old)
    for _ in range(_TRIES if places else 0):
        at = chance.choice(places)
        alphabet = _DIGITS if old[at].isdigit() else _LETTERS
        letter = chance.choice(alphabet)
        new = old[:at] + (letter.upper() if old[at].isupper() else letter) + old[at + 1 :]
        try:
            found = _value(new)
        except (SyntaxError, ValueError):
            continue
        if type(found) is type(value) and found != value:
            return new
    return None


def _value(literal: str) -> object:
    # In brackets, for a string may be put together of several on lines of their own.
    return ast.literal_eval(f"({literal}\n)")


def _apply(source: str, edits: Sequence[_Edit]) -> str:
    data = source.encode()
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        data = data[: edit.start] + edit.text + data[edit.end :]
    return data.decode()
