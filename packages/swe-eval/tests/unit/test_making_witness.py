from __future__ import annotations

import contextlib
import linecache
from pathlib import Path
from typing import Any

import pytest
from swe_eval.generate.failure import Failure
from swe_eval.making.witness import describe

HEADER = """\
import unittest
import pytest
def add(a, b):
    return a - b
def refuse(a):
    raise KeyError(a)
"""


def seen(tmp_path: Path, body: str) -> dict[str, Any]:
    """What the witness says of a test with this body, which has to fail."""
    path = tmp_path / "test_it.py"
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    path.write_text(f"{HEADER}def test_it(self=unittest.TestCase()):\n{lines}")
    linecache.clearcache()
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    with contextlib.suppress(KeyError):
        try:
            scope["test_it"]()
        except BaseException as error:
            return describe(error, "test_it")
    raise AssertionError("the test did not fail")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("assert add(2, 3) == 5", "`add(2, 3)` gives `-1`, expected `5`."),
        ("assert 5 == add(2, 3)", "`add(2, 3)` gives `-1`, expected `5`."),
        ("self.assertEqual(add(2, 3), 5)", "`add(2, 3)` gives `-1`, expected `5`."),
        (
            "for x in (0, 3):\n    assert add(x, x + 1) == 2 * x + 1",
            "With `x = 0`, `add(x, x + 1)` gives `-1`, expected `1`.",
        ),
        (
            "got = add(2, 3)\nassert got == 5",
            "`add(2, 3)` gives `-1`, expected `5`.",
        ),
        (
            "class Odd:\n    n = 3\nmade = Odd()\nmore = [made]\nassert add(more[0].n, 1) == 4",
            "With `made = Odd()` and `more = [made]`, `add(more[0].n, 1)` gives `2`, expected `4`.",
        ),
        ("assert add(2, 2)", "`add(2, 2)` gives `0`, which should count as true."),
        ("self.assertTrue(add(2, 2))", "`add(2, 2)` gives `0`, which should count as true."),
        ("assert refuse(1) == 1", "`refuse(1)` raises `KeyError: 1`, expected `1`."),
        ("refuse('a')", "`refuse('a')` raises `KeyError: 'a'`."),
        (
            "shop = {}\nassert 3 == shop['a']",
            "With `shop = {}`, `shop['a']` raises `KeyError: 'a'`, expected `3`.",
        ),
        ("shop = {}\nshop['a'] += 3", "With `shop = {}`, `shop['a'] += 3` raises `KeyError: 'a'`."),
        ("shop = {}\ndel shop['a']", "With `shop = {}`, `del shop['a']` raises `KeyError: 'a'`."),
        ("for x in refuse(1):\n    pass", "`refuse(1)` raises `KeyError: 1`."),
        ("x = refuse('a')", "`refuse('a')` raises `KeyError: 'a'`."),
        (
            "with pytest.raises(ValueError):\n    add(1, 2)",
            "`add(1, 2)` should raise `ValueError`, but raises nothing.",
        ),
        (
            "with self.assertRaises(ValueError):\n    add(1, 2)",
            "`add(1, 2)` should raise `ValueError`, but raises nothing.",
        ),
        (
            "with pytest.raises(ValueError):\n    refuse(1)",
            "`refuse(1)` raises `KeyError: 1`, expected `ValueError`.",
        ),
    ],
)
def test_call_result_and_expectation(tmp_path: Path, body: str, sentence: str) -> None:
    assert Failure.read({"test": "t", **seen(tmp_path, body)}).sentence() == sentence


def test_what_gives_something_else_the_second_time_is_not_shown(tmp_path: Path) -> None:
    used_up = "numbers = iter([4, 5])\nassert add(*numbers) == 9"
    assert seen(tmp_path, used_up).get("call", "") == ""


def test_a_variable_without_a_value_to_show_is_shown_by_its_source(tmp_path: Path) -> None:
    found = seen(tmp_path, "made = object()\nassert add(1, 1) == id(made)")
    assert found["form"] == "compared"
    found = seen(tmp_path, "made = object()\nassert str(type(made)) == 'x' + str(add(1, 2))")
    assert found["given"] == {"made": "object()"}


def test_places_in_memory_and_long_texts_are_not_shown(tmp_path: Path) -> None:
    assert seen(tmp_path, "assert add(1, 2) == object()")["want"] == "<object object>"
    assert seen(tmp_path, "assert add(1, 2) == 'x' * 1000").get("call", "") == ""


def test_objects_that_fail_when_looked_at_do_no_harm(tmp_path: Path) -> None:
    body = """\
class Odd:
    def __repr__(self):
        raise RuntimeError
odd = Odd()
assert odd == 1"""
    assert seen(tmp_path, body)["form"] == "other"


def test_a_fixture_is_seen_by_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "conftest.py"
    path.write_text("def basket():\n    return int('a')\n")
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    with pytest.raises(ValueError, match="invalid literal") as raised:
        scope["basket"]()
    assert "call" not in describe(raised.value, "test_sum")
    said = describe(raised.value, "test_sum", f"{tmp_path}/")
    assert (said["form"], said["call"]) == ("raised", "int('a')")
