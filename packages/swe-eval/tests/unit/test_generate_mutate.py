from __future__ import annotations

import bisect
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swe_eval.generate import KINDS, mutate

EVERYTHING = '''\
"""A module with a place for every kind of bug."""

import contextlib


class Base:
    def scale(self, value):
        return value * 2


class Child(Base):
    def shift(self, value):
        return value + 1

    def unshift(self, value):
        return value - 1


def clamp(value, low, high):
    """Keep a value between two others."""
    if value < low:
        return low
    else:
        value = min(value, high)
    return value if low < value and value < high else high


def collect(items, limit):
    total = 0
    with contextlib.suppress(ValueError):
        for item in items[:limit]:
            total += abs(item) - limit * 3
    return total
'''


def bugs(source: str, kind: str) -> list[str]:
    """The changed line of every bug of a kind."""
    return [
        (bug.source.splitlines()[bug.line - 1 :] or [""])[0].strip()
        for bug in mutate(source, kinds=(kind,))
    ]


def test_every_kind_is_proposed_where_there_is_a_place_for_it() -> None:
    assert {bug.kind for bug in mutate(EVERYTHING)} == set(KINDS)


def test_every_bug_is_valid_python_differs_and_comes_once() -> None:
    sources = [bug.source for bug in mutate(EVERYTHING)]
    assert len(set(sources)) == len(sources)
    assert EVERYTHING not in sources
    for source in sources:
        compile(source, "bug", "exec")


def test_source_that_nobody_prepared_can_be_broken() -> None:
    source = inspect.getsource(bisect)
    found = list(mutate(source, function="bisect_left"))
    assert {"comparison_change", "operator_change", "remove_conditional"} <= {b.kind for b in found}
    start = source.splitlines().index(
        next(line for line in source.splitlines() if line.startswith("def bisect_left"))
    )
    assert all(bug.line > start for bug in found)


def test_comments_and_layout_survive() -> None:
    source = "def f(a, b):  # two numbers\n    return (a  +  b)  # their sum\n"
    assert "    return (a  -  b)  # their sum\n" in [
        bug.source.splitlines(keepends=True)[1] for bug in mutate(source)
    ]


@pytest.mark.parametrize(
    ("kind", "line", "expected"),
    [
        ("operator_change", "return a - b", {"return a + b", "return a * b"}),
        ("comparison_change", "return a < b", {"return a <= b", "return a > b", "return a >= b"}),
        ("operand_swap", "return a - b", {"return b - a"}),
        ("operand_swap", "return a - (a + b)", {"return (a + b) - a", "return a - (b + a)"}),
        ("break_chain", "return a + b + 3", {"return a + b", "return a + 3", "return b + 3"}),
        ("invert_condition", "return a if a > b else b", {"return b if a > b else a"}),
        ("boolean_change", "return a and b", {"return a or b"}),
        ("wrong_variable", "return max(a, b)", {"return max(b, b)", "return max(a, a)"}),
        ("builtin_swap", "return max(a, b)", {"return min(a, b)"}),
        ("off_by_one", "return a[:b]", {"return a[:b + 1]", "return a[:b - 1]"}),
        ("off_by_one", "return a[:b + 1]", {"return a[:b]"}),
        ("off_by_one", "return len(a)", {"return len(a) + 1", "return len(a) - 1"}),
        ("remove_call", "return abs(a - b)", {"return a - b"}),
        ("slice_flip", "return a[b:]", {"return a[:b]"}),
        ("remove_conditional", "return a if b else 0", {"return a", "return 0"}),
    ],
)
def test_kind_does_what_its_name_says(kind: str, line: str, expected: set[str]) -> None:
    assert set(bugs(f"def f(a, b):\n    {line}\n", kind)) == expected


def test_starting_value_is_its_own_kind() -> None:
    source = "def f(items):\n    total = 0\n    return total + 5\n"
    assert set(bugs(source, "wrong_initial_value")) == {"total = 1"}
    assert all("total = 0" in bug.source for bug in mutate(source, kinds=("constant_change",)))


def test_names_that_are_no_variables_stay() -> None:
    source = "def f(a, b):\n    return g(a=b.a, b=1)\n"
    assert set(bugs(source, "wrong_variable")) == {"return g(a=a.a, b=1)"}


def test_multi_line_bugs_are_marked() -> None:
    removed = list(mutate(EVERYTHING, kinds=("remove_loop", "shuffle_lines")))
    assert removed
    assert not any(bug.single_line for bug in removed)
    assert all(bug.single_line for bug in mutate(EVERYTHING, kinds=("operator_change",)))


def test_removing_the_only_statement_leaves_a_valid_block() -> None:
    source = "def f(a):\n    for x in a:\n        x.y = 1\n"
    assert "        pass\n" in {
        line
        for bug in mutate(source, kinds=("remove_assign",))
        for line in bug.source.splitlines(keepends=True)
    }


def test_invalid_source_and_unknown_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="does not parse"):
        list(mutate("def f(:\n"))
    with pytest.raises(ValueError, match="no_such_kind"):
        list(mutate("x = 1\n", kinds=("no_such_kind",)))


@given(
    left=st.sampled_from(["a", "b", "3", "a + b", "(a - b)"]),
    operator=st.sampled_from(["+", "-", "*", "//", "<", ">=", "and", "or"]),
    right=st.sampled_from(["a", "b", "7", "b * a", "abs(b)"]),
)
def test_single_line_bugs_are_undone_by_one_line(left: str, operator: str, right: str) -> None:
    source = f"def f(a, b):\n    c = 1\n    return {left} {operator} {right}\n"
    original = source.splitlines()
    for bug in mutate(source):
        if bug.single_line:
            lines = bug.source.splitlines()
            lines[bug.line - 1] = original[bug.line - 1]
            assert lines == original
