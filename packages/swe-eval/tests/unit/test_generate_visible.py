from __future__ import annotations

import pytest
from swe_eval.generate.visible import without_tests

TESTS = """\
import pytest

from shop import add


def helper():
    return 1


@pytest.mark.parametrize(
    "x", [1, 2]
)
def test_cases(x):
    assert add(x, 1)


class TestShop:
    def test_one(self):
        assert add(1, 1) == 2

    def test_two(self):
        assert helper() == 1


def test_last():
    assert True
"""


def test_a_byte_order_mark_keeps_no_test_from_going() -> None:
    plain = without_tests(TESTS, ["test_last"])
    assert plain is not None
    assert without_tests("\ufeff" + TESTS, ["test_last"]) == "\ufeff" + plain


def test_tests_go_with_their_decorators_and_the_rest_stays() -> None:
    left = without_tests(TESTS, ["test_cases[1]", "TestShop::test_one"])
    assert left is not None
    assert "test_cases" not in left
    assert "parametrize" not in left
    assert "test_one" not in left
    assert "    def test_two(self):" in left
    assert left.startswith("import pytest\n\nfrom shop import add\n\n\ndef helper")


def test_a_class_that_is_left_empty_stays_valid() -> None:
    left = without_tests(TESTS, ["TestShop::test_one", "TestShop::test_two"])
    assert left is not None
    compile(left, "t", "exec")
    assert "class TestShop" in left
    assert "test_two" not in left


@pytest.mark.parametrize(
    ("source", "tests"),
    [
        ("test_made = make()\n\n\ndef test_b():\n    pass\n", ["test_made"]),
        ("class TestA(Base):\n    def test_b(self):\n        pass\n", ["TestA::test_inherited"]),
        ("def test_a():\n    pass\n\n\ndef test_b():\n    test_a()\n", ["test_a"]),
        ("def test_a():\n    pass\n", ["test_a"]),
        ("def test_a(:\n", ["test_a"]),
    ],
    ids=["made by a call", "inherited", "used by another", "the only one", "no Python"],
)
def test_else_the_whole_file_is_held_back(source: str, tests: list[str]) -> None:
    assert without_tests(source, tests) is None


TABLES = """\
import pytest

MORE: list[int] = [23]
CASES = [
    (1, 2),
    *MORE,
]
SHARED = {"a": 31}
GROWN = [41]
GROWN += [42]
LISTED = [51]
LISTED.append(52)
ONE = [61]; TWO = [62]


@pytest.mark.parametrize("case", [*CASES, *SHARED, *GROWN, *LISTED, *ONE])
def test_cases(case):
    assert case


def test_shared():
    assert SHARED
"""


def test_a_table_goes_with_the_last_test_that_uses_it_and_so_do_those_it_is_made_of() -> None:
    left = without_tests(TABLES, ["test_cases[1]"])
    assert left is not None
    assert all(gone not in left for gone in ("MORE", "CASES", "23", "(1, 2)"))
    # What another test uses, or another statement changes, stays.
    for kept in ('SHARED = {"a": 31}', "GROWN = [41]", "LISTED = [51]", "TWO = [62]"):
        assert kept in left
    assert without_tests(TABLES, ["test_shared", "test_cases"]) is None


def test_a_table_that_another_file_may_use_stays() -> None:
    left = without_tests(TABLES, ["test_cases"], lambda name: name == "CASES")
    assert left is not None
    assert "*MORE" in left
    assert "MORE: list[int] = [23]" in left
