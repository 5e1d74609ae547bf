"""The runner itself, in a plain folder: what each kind of test and each way of ending comes to."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from swe_eval.core.verdict import GradeReason, TestStatus, Verdict
from swe_eval.grading.trial import Observation, Trial
from swe_eval.tasks.task import Task, TestGrader, TestRunner

FIXED = "def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return 2 * a\n"
RUNNERS = [TestRunner.FUNCTIONS, TestRunner.PYTEST]

MakeShop = Callable[..., Task]


async def observe(host: Any, task: Task, source: str = FIXED, **more: str) -> Observation:
    """Runs the task's grader over a work folder in which files were replaced."""
    sandbox_id = await host.create(task.environment)
    try:
        files = {"shop.py": source, **{k.replace("__", "/"): v for k, v in more.items()}}
        for path, text in files.items():
            host.put(sandbox_id, path, text)
        return await Trial(host=host, python=sys.executable, log_bytes=2000).run(task, sandbox_id)
    finally:
        await host.destroy(sandbox_id)


def statuses(seen: Observation) -> dict[str, TestStatus]:
    return {test.name.partition("::")[2]: test.status for test in seen.judgement.tests}


@pytest.mark.parametrize("runner", RUNNERS)
async def test_a_repaired_repository_is_solved(
    folder_host: Any, make_shop: MakeShop, runner: TestRunner
) -> None:
    seen = await observe(folder_host, make_shop(runner=runner))
    assert seen.judgement.verdict is Verdict.SOLVED, seen


@pytest.mark.parametrize("runner", RUNNERS)
async def test_a_broken_repository_fails_exactly_the_tests_that_notice(
    folder_host: Any, make_shop: MakeShop, runner: TestRunner
) -> None:
    seen = await observe(folder_host, make_shop(runner=runner), FIXED.replace("+", "-"))
    assert seen.judgement.reason is GradeReason.TESTS_FAILED
    assert statuses(seen) == {"test_add": TestStatus.FAILED, "test_double": TestStatus.PASSED}


@pytest.mark.parametrize("options", ["-x", "--maxfail=1"])
async def test_all_tests_are_run_where_the_repository_stops_at_the_first_failure(
    folder_host: Any, make_shop: MakeShop, options: str
) -> None:
    task = make_shop(runner=TestRunner.PYTEST)
    settings = {"pytest.ini": f"[pytest]\naddopts = {options}\n"}
    seen = await observe(folder_host, task, FIXED.replace("+", "-"), **settings)
    assert statuses(seen) == {"test_add": TestStatus.FAILED, "test_double": TestStatus.PASSED}


@pytest.mark.parametrize("runner", RUNNERS)
async def test_every_way_for_a_test_to_end_has_its_status(
    folder_host: Any, make_shop: MakeShop, runner: TestRunner
) -> None:
    hidden = """\
import unittest

def test_passes(): assert 1 == 1
def test_fails(): assert 1 == 2, "one is not two"
def test_errors(): raise ValueError("broken")
def test_exits(): raise SystemExit(0)
def test_skips(): raise unittest.SkipTest("not today")
"""
    names = ["passes", "fails", "errors", "exits", "skips", "is_absent"]
    ids = tuple(f"tests/test_hidden.py::test_{name}" for name in names)
    task = make_shop(runner=runner, hidden=hidden, fail_to_pass=ids, pass_to_pass=())
    found = statuses(await observe(folder_host, task))
    failing = {TestStatus.FAILED, TestStatus.ERROR}
    assert found["test_passes"] is TestStatus.PASSED
    assert found["test_fails"] is TestStatus.FAILED
    assert found["test_errors"] in failing
    assert found["test_exits"] in failing
    assert found["test_skips"] is TestStatus.SKIPPED
    assert found["test_is_absent"] is TestStatus.MISSING


async def test_a_coroutine_or_generator_has_tested_nothing(
    folder_host: Any, make_shop: MakeShop
) -> None:
    hidden = "async def test_add(): assert False\n\n\ndef test_double(): yield\n"
    found = statuses(await observe(folder_host, make_shop(hidden=hidden)))
    assert found["test_double"] is TestStatus.ERROR
    assert found["test_add"] in {TestStatus.ERROR, TestStatus.MISSING}


@pytest.mark.parametrize("runner", RUNNERS)
async def test_a_repository_that_can_not_be_imported_fails_every_test(
    folder_host: Any, make_shop: MakeShop, runner: TestRunner
) -> None:
    seen = await observe(folder_host, make_shop(runner=runner), "def add(:\n")
    assert seen.judgement.verdict is Verdict.UNSOLVED
    assert TestStatus.PASSED not in statuses(seen).values()


async def test_an_endless_loop_ends_by_its_processor_time(
    folder_host: Any, make_shop: MakeShop
) -> None:
    task = make_shop(cpu_s=1)
    seen = await observe(
        folder_host, task, "def add(a, b):\n    while True:\n        pass\n\n\ndouble = add\n"
    )
    assert seen.judgement.reason is GradeReason.TIMEOUT
    assert seen.judgement.needs_reference
    assert "processor time" in seen.detail


async def test_a_sleeper_ends_by_the_wall_clock(folder_host: Any, make_shop: MakeShop) -> None:
    source = (
        "import time\n\n\ndef add(a, b):\n    return a + b\n\n\n"
        "def double(a):\n    time.sleep(60)\n"
    )
    seen = await observe(folder_host, make_shop(wall_s=0.7), source)
    assert seen.judgement.reason is GradeReason.TIMEOUT
    assert "wall clock" in seen.detail
    assert statuses(seen)["test_double"] is TestStatus.MISSING


async def test_a_test_that_forks_is_reported_once(folder_host: Any, make_shop: MakeShop) -> None:
    source = (
        "import os, sys\n\n\ndef add(a, b):\n    if os.fork() == 0:\n        sys.exit(0)\n"
        "    os.wait()\n    return a + b\n\n\ndef double(a):\n    os.fork()\n    return 2 * a\n"
    )
    seen = await observe(folder_host, make_shop(), source)
    assert seen.judgement.verdict is Verdict.SOLVED, seen


async def test_a_long_suite_sends_results_as_they_come(
    folder_host: Any, make_shop: MakeShop
) -> None:
    names = [f"test_{i}" for i in range(300)]
    hidden = "import time\n" + "".join(f"def {n}(): time.sleep(0.01)\n" for n in names)
    ids = tuple(f"tests/test_hidden.py::{n}" for n in names)
    task = make_shop(hidden=hidden, fail_to_pass=ids, pass_to_pass=(), wall_s=1.0)
    seen = await observe(folder_host, task)
    assert seen.judgement.reason is GradeReason.TIMEOUT
    found = list(statuses(seen).values())
    assert 10 < found.count(TestStatus.PASSED) < 290
    assert found.count(TestStatus.MISSING) == 300 - found.count(TestStatus.PASSED)


async def test_a_killed_test_process_asks_for_the_reference(
    folder_host: Any, make_shop: MakeShop
) -> None:
    source = "import os, signal\n\n\ndef add(a, b):\n    os.kill(os.getpid(), signal.SIGKILL)\n\n\n"
    seen = await observe(folder_host, make_shop(), source + "def double(a):\n    return 2 * a\n")
    assert seen.judgement.reason is GradeReason.OUT_OF_MEMORY
    assert seen.judgement.needs_reference


@pytest.mark.parametrize("runner", RUNNERS)
async def test_output_of_the_tested_code_ends_in_the_log_and_hidden_lines_do_not(
    folder_host: Any, make_shop: MakeShop, runner: TestRunner
) -> None:
    source = "print('hello from the shop', flush=True)\n" + FIXED.replace("+", "-")
    seen = await observe(folder_host, make_shop(runner=runner), source)
    if runner is TestRunner.FUNCTIONS:  # pytest shows captured output of failing tests only
        assert "hello from the shop" in seen.log_tail
    assert "AssertionError" in seen.log_tail or "assert" in seen.log_tail
    assert "add(20, 3) == 23" not in seen.log_tail


async def test_a_flood_of_output_is_cut_from_its_start(
    folder_host: Any, make_shop: MakeShop
) -> None:
    source = "print('x' * 3_000_000)\nprint('the end', flush=True)\n" + FIXED
    seen = await observe(folder_host, make_shop(), source)
    assert seen.judgement.verdict is Verdict.SOLVED
    assert len(seen.log_tail) <= 2000
    assert "the end" in seen.log_tail


async def test_no_file_of_the_grader_is_left_where_tests_run(
    folder_host: Any, make_shop: MakeShop
) -> None:
    source = (
        "import os, sys\n"
        "tests = [n for p, _, ns in os.walk('.') for n in ns if n == 'test_hidden.py']\n"
        "jobs = [f'{p}/{n}' for p, _, ns in os.walk('/tmp') for n in ns if n == 'job']\n"
        "print('LEFT', tests, jobs, flush=True)\n" + FIXED
    )
    seen = await observe(folder_host, make_shop(), source)
    assert seen.judgement.verdict is Verdict.SOLVED
    mine = [f for f in folder_host.written if f.endswith("/job")]
    assert len(mine) == 1
    assert mine[0] not in seen.log_tail
    assert "test_hidden.py" not in seen.log_tail.partition("LEFT")[2]


async def test_a_module_of_the_repository_is_found_before_one_of_the_runner(
    folder_host: Any, make_shop: MakeShop
) -> None:
    hidden = "from boot import here\n\n\ndef test_add(): assert here\n\n\ndef test_double(): pass\n"
    seen = await observe(folder_host, make_shop(hidden=hidden), FIXED, **{"boot.py": "here = 1\n"})
    assert seen.judgement.verdict is Verdict.SOLVED, seen


async def test_pytest_features_work_with_the_pytest_runner(
    folder_host: Any, make_shop: MakeShop
) -> None:
    hidden = """\
import pytest
from shop import add


@pytest.fixture
def three(): return 3


class TestAdd:
    @pytest.mark.parametrize("n", [1, 2])
    def test_n(self, n, three): assert add(n, three) == n + 3

    @pytest.mark.xfail
    def test_known(self): assert add(1, 1) == 3

    @pytest.fixture
    def broken(self): raise ValueError

    def test_setup(self, broken): pass
"""
    ids = tuple(
        f"tests/test_hidden.py::TestAdd::{n}"
        for n in ("test_n[1]", "test_n[2]", "test_known", "test_setup")
    )
    task = make_shop(runner=TestRunner.PYTEST, hidden=hidden, fail_to_pass=ids, pass_to_pass=())
    found = [test.status for test in (await observe(folder_host, task)).judgement.tests]
    assert found == [TestStatus.PASSED] * 3 + [TestStatus.ERROR]


async def test_other_kinds_of_interpreter_compile_the_source(
    folder_host: Any, make_shop: MakeShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    import swe_eval.grading.job as job

    files = {k: v for k, v in job._runner_files().items() if not k.startswith("runner.cpython")}
    monkeypatch.setattr(job, "_runner_files", lambda: files)
    seen = await observe(folder_host, make_shop())
    assert seen.judgement.verdict is Verdict.SOLVED
    assert not any(".cpython" in path for path in folder_host.written)


def test_required_tests_keep_their_order_and_come_once(make_shop: MakeShop) -> None:
    grader = make_shop(fail_to_pass=("a::x", "a::y"), pass_to_pass=("a::y", "a::z")).grader
    assert isinstance(grader, TestGrader)
    assert grader.required == ("a::x", "a::y", "a::z")
