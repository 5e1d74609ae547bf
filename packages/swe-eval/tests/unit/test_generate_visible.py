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
