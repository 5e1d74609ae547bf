from __future__ import annotations

import itertools

import pytest
from swe_eval.generate import (
    KINDS,
    Split,
    WrittenRepository,
    check_disjoint,
    load_written_repositories,
    tasks_from_repository,
)
from swe_eval.generate.execute import load_modules, run_tests


def repository(name: str) -> WrittenRepository:
    return next(found for found in load_written_repositories() if found.name == name)


def test_every_shipped_repository_passes_its_own_tests() -> None:
    for found in load_written_repositories():
        results = run_tests(found.files, found.tests)
        assert len(results) >= 10
        assert all(result.passed for result in results.values()), found.name


def test_both_learning_splits_have_written_repositories_and_share_none() -> None:
    parts = {
        split.value: [
            task
            for found in load_written_repositories()
            if found.split is split
            for task in itertools.islice(tasks_from_repository(found), 20)
        ]
        for split in (Split.TRAIN, Split.HELDOUT)
    }
    counts = check_disjoint(parts)
    assert all(count["task"] for count in counts.values())


def test_kinds_that_need_classes_and_blocks_are_found() -> None:
    wanted = ("class_remove_base", "class_remove_method", "remove_wrapper", "remove_loop")
    tasks = list(tasks_from_repository(repository("ledger"), kinds=wanted))
    assert {task.kind for task in tasks} == set(wanted)
    assert set(wanted) < set(KINDS)


def test_task_is_kept_only_if_a_test_notices() -> None:
    for task in itertools.islice(tasks_from_repository(repository("textkit")), 25):
        results = run_tests(task.files, task.hidden_tests)
        failing = {name for name, result in results.items() if not result.passed}
        assert failing == set(task.fail_to_pass)
        assert failing


def test_issue_reports_what_the_user_saw() -> None:
    tasks = tasks_from_repository(repository("timetable"), kinds=("builtin_swap",))
    assert any("` gives `" in task.instruction for task in tasks)


def test_issue_never_reports_a_name_error_of_its_own_making() -> None:
    tasks = tasks_from_repository(repository("inventory"), kinds=("operator_change",))
    assert not any("NameError" in task.instruction for task in tasks)


def test_repository_with_failing_tests_is_refused() -> None:
    broken = WrittenRepository(
        "x", Split.TRAIN, {"x.py": "def f():\n    return 1\n"},
        {"test_x.py": "from x import f\n\n\ndef test_f():\n    assert f() == 2\n"},
    )  # fmt: skip
    with pytest.raises(ValueError, match="fails its own tests"):
        next(tasks_from_repository(broken))


def test_endless_loop_costs_a_failed_test_and_no_time() -> None:
    files = {"x.py": "def f():\n    while True:\n        pass\n"}
    tests = {"test_x.py": "from x import f\n\n\ndef test_f():\n    f()\n"}
    results = run_tests(files, tests)
    assert results["test_x.py::test_f"].error == "StepBudgetExceededError"


def test_module_that_cannot_load_fails_every_test() -> None:
    tests = {"test_x.py": "from x import f\n\n\ndef test_f():\n    f()\n"}
    results = run_tests({"x.py": "def f(:\n"}, tests)
    assert results["test_x.py::test_f"].error == "SyntaxError"


def test_modules_import_one_another_and_leave_nothing_behind() -> None:
    import sys

    before = set(sys.modules)
    modules = load_modules({"one.py": "import two\nx = two.y + 1\n", "two.py": "y = 1\n"})
    assert modules["one"].x == 2
    assert set(sys.modules) == before
