"""Altered tests: a right program fails exactly them, whatever else a test holds."""

import ast
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swe_eval.core.verdict import GradeReason, RunEnd, TestStatus, Verdict, judge
from swe_eval.generate import make_task
from swe_eval.grading.controls import Control, LineControl, make_control, make_line_control

P = TestStatus.PASSED
F = TestStatus.FAILED


def control(source: str, *names: str, seed: int = 1, blind: tuple[str, ...] = ()) -> Control | None:
    ids = tuple(f"t.py::{name}" for name in names)
    return make_control({"t.py": source}, ids, (), seed=seed, blind=blind)


def outcome(source: str, name: str, **world: Any) -> str:
    scope: dict[str, Any] = dict(world)
    exec(source, scope)
    try:
        scope[name]()
    except AssertionError:
        return "failed"
    return "passed"


ALTERABLE = {
    "f() == 23": 23,
    "23 == f()": 23,
    "f() == -3.5": -3.5,
    "f() == 'abc'": "abc",
    "f() == b'x1'": b"x1",
    "f() == (\n        'one'  # first\n        'two'\n    )": "onetwo",
    "f() is True": True,
    "f() == [1, ('a', 2), {'k': 3}]": [1, ("a", 2), {"k": 3}],
    "f()": 1,
    "not f()": 0,
    "f() in (1, 2)": 1,
    "f() not in (1, 2)": 3,
    "f() < 2": 1,
    "f() >= 2": 2,
}


@pytest.mark.parametrize("condition", ALTERABLE)
@pytest.mark.parametrize("seed", range(5))
def test_an_altered_assertion_fails_with_the_value_that_passed(condition: str, seed: int) -> None:
    source = f"def test_a():\n    x = 'ä'  # before it on the line\n    assert {condition}\n"

    def right() -> object:
        return ALTERABLE[condition]

    assert outcome(source, "test_a", f=right) == "passed"
    made = control(source, "test_a", seed=seed)
    assert made is not None
    assert outcome(made.files["t.py"], "test_a", f=right) == "failed"
    assert made.altered == {"t.py::test_a"}


@pytest.mark.parametrize(
    "source",
    [
        "def test_a():\n    assert f() is None\n",
        "def test_a():\n    assert f() == g()\n",
        "def test_a():\n    assert f() == ''\n",
        "def test_a():\n    assert f() == {1, 2}\n",
        "def test_a():\n    assert f() == 1, 'it is 1'\n",
        "def test_a():\n    if f():\n        assert f() == 1\n",
        "def test_a():\n    if f():\n        return\n    assert f() == 1\n",
        "def test_a():\n    yield\n    assert f() == 1\n",
        "async def test_a():\n    assert f() == 1\n",
        "import pytest\n@pytest.mark.xfail\ndef test_a():\n    assert f() == 1\n",
        "import pytest\npytestmark = pytest.mark.xfail\ndef test_a():\n    assert f() == 1\n",
        "def test_a():\n    pass\n",
        "def test_a(:\n",
    ],
)
def test_what_a_right_program_might_not_fail_is_left_as_it_is(source: str) -> None:
    assert control(source, "test_a") is None


def test_unittests_and_parameters_are_altered_too() -> None:
    source = (
        "import unittest\nclass Shop(unittest.TestCase):\n"
        "    def test_a(self):\n        self.assertEqual(f(), 23)\n"
        "    def test_b(self):\n        self.assertTrue(f())\n"
    )
    made = control(source, "Shop::test_a[1]", "Shop::test_a[2]", "Shop::test_b")
    assert made is not None
    assert made.altered == {"t.py::Shop::test_a[1]", "t.py::Shop::test_a[2]", "t.py::Shop::test_b"}
    assert "self.assertFalse(f())" in made.files["t.py"]
    assert "f(), 23)" not in made.files["t.py"]


def test_of_two_functions_with_one_name_the_later_is_altered() -> None:
    source = "def test_a():\n    assert f() == 1\n\ndef test_a():\n    assert f() == 2\n"
    made = control(source, "test_a")
    assert made is not None
    assert "f() == 1" in made.files["t.py"]
    assert "f() == 2" not in made.files["t.py"]


def test_all_fail_to_pass_tests_are_altered_and_by_chance_some_of_the_others() -> None:
    task = make_task("heldout", 0)
    patterns = set()
    for seed in range(20):
        made = make_control(task.hidden_tests, task.fail_to_pass, task.pass_to_pass, seed=seed)
        assert made is not None
        assert made.altered.issuperset(task.fail_to_pass)
        patterns.add(made.altered)
    assert len(patterns) == 20
    assert any(set(task.pass_to_pass) - pattern for pattern in patterns)


def test_an_altered_test_has_the_shape_of_the_real_one() -> None:
    task = make_task("heldout", 0)
    made = make_control(task.hidden_tests, task.fail_to_pass, task.pass_to_pass, seed=3)
    assert made is not None
    for path, source in task.hidden_tests.items():
        altered = made.files[path]
        kinds = [[type(n) for n in ast.walk(ast.parse(s))] for s in (source, altered)]
        assert kinds[0] == kinds[1]
        assert source.count("\n") == altered.count("\n")


def test_blind_tests_are_not_altered_again() -> None:
    source = "def test_a():\n    assert f() == 1\n\ndef test_b():\n    assert f() == 2\n"
    made = control(source, "test_a", "test_b", blind=("t.py::test_a",))
    assert made is not None
    assert made.altered == {"t.py::test_b"}


@given(st.lists(st.sampled_from([*TestStatus, None]), min_size=3, max_size=3))
def test_only_the_pattern_of_a_right_program_is_solved(found: list[TestStatus | None]) -> None:
    made = Control(files={}, altered=frozenset({"a", "b"}))
    statuses = {n: s for n, s in zip("abc", found, strict=True) if s is not None}
    seen = made.judge(judge(required="abc", statuses=statuses, end=RunEnd.FINISHED))
    right = found[0] in {F, TestStatus.ERROR} and found[1] in {F, TestStatus.ERROR}
    assert (seen.verdict is Verdict.SOLVED) == (right and found[2] is P)


def test_a_run_that_did_not_end_proves_nothing_though_its_results_look_right() -> None:
    made = Control(files={}, altered=frozenset({"a"}))
    for end in (RunEnd.TIMEOUT, RunEnd.ABORTED, RunEnd.TAMPERED, RunEnd.OUT_OF_MEMORY):
        seen = made.judge(judge(required="ab", statuses={"a": F, "b": P}, end=end))
        assert seen.verdict is Verdict.UNSOLVED


# -- scripts and logs ------------------------------------------------------------------------------

DIFF = """\
git apply - <<'END'
diff --git a/t.py b/t.py
--- a/t.py
+++ b/t.py
@@ -1,2 +1,3 @@
 def test_a():
     assert f() == 1
+    assert g() == 2
END
"""


def test_of_a_diff_in_a_script_only_added_lines_are_altered() -> None:
    made = make_line_control({"eval.sh": DIFF}, seed=1)
    assert made is not None
    changed = [
        (old, new)
        for old, new in zip(DIFF.split("\n"), made.files["eval.sh"].split("\n"), strict=True)
        if old != new
    ]
    assert len(changed) == 1
    assert changed[0][0] == "+    assert g() == 2"
    assert changed[0][1].startswith("+    assert g() == ")


def test_a_script_without_assertions_has_no_control() -> None:
    assert make_line_control({"eval.sh": "make test\n"}, seed=1) is None


def test_the_reference_tells_which_tests_altered_lines_concern() -> None:
    made = LineControl(files={}, altered=frozenset())
    ran = judge(required="abc", statuses={"a": F, "b": P, "c": F}, end=RunEnd.FINISHED)
    learned = made.learned(ran)
    assert learned is not None
    assert learned.altered == {"a", "c"}
    for statuses, verdict in (
        ({"a": F, "b": P, "c": F}, Verdict.SOLVED),
        ({"a": P, "b": P, "c": F}, Verdict.UNSOLVED),
        ({"a": P, "b": P, "c": P}, Verdict.UNSOLVED),
    ):
        seen = learned.judge(judge(required="abc", statuses=statuses, end=RunEnd.FINISHED))
        assert seen.verdict is verdict
    passed = judge(required="a", statuses={"a": P}, end=RunEnd.FINISHED)
    assert made.learned(passed) is None
    assert made.judge(passed).reason is GradeReason.CONTROL_PASSED
