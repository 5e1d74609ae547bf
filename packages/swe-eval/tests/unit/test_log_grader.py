"""Grading by a script of the repository's own, in plain folders."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
from service_kit.errors import FailedPrecondition
from swe_eval.config import GradingConfig
from swe_eval.core.verdict import GradeReason, Verdict
from swe_eval.grading.faults import FAULT_CAUSE_KEY
from swe_eval.grading.log_run import named_in_command
from swe_eval.grading.run import Grade, Grader
from swe_eval.tasks.task import LogGrader, Task

MakeShop = Callable[..., Task]
TESTS = """\
import unittest, shop

class T(unittest.TestCase):
    def test_add(self):
        self.assertEqual(shop.add(20, 3), 23)

    def test_double(self):
        self.assertEqual(shop.double(21), 42)
"""
SCRIPT = f"""\
set -uxo pipefail
git diff || true
cat > checks.py <<'EOF'
{TESTS}EOF
: '>>>>> Start Test Output'
{sys.executable} -m unittest -v checks
: '>>>>> End Test Output'
true
"""


def to(line: str) -> bytes:
    return (
        "diff --git a/shop.py b/shop.py\n--- a/shop.py\n+++ b/shop.py\n@@ -1,4 +1,4 @@\n"
        f" def add(a, b):\n-    return a - b\n+    {line}\n \n \n"
    ).encode()


@pytest.fixture
def task(make_shop: MakeShop) -> Task:
    shop = make_shop()
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    suffix = {name: f".{name}" if python >= "3.11" else "" for name in ("test_add", "test_double")}
    ids = {name: f"{name} (checks.T{end})" for name, end in suffix.items()}
    grader = LogGrader(
        script=SCRIPT.replace("cat > checks.py", f"cd {shop.environment.workdir}\ncat > checks.py"),
        parser="unittest",
        fail_to_pass=(ids["test_add"],),
        pass_to_pass=(ids["test_double"],),
        protected=frozenset({"checks.py"}),
        wall_s=30,
    )
    return dataclasses.replace(shop, grader=grader)


async def grade(host: Any, task: Task, diff: bytes) -> Grade:
    config = GradingConfig(python=sys.executable)
    return await Grader(host, config).grade(task, diff, attempt="g/0/0/0")


async def test_a_repair_is_solved_and_another_change_is_not(folder_host: Any, task: Task) -> None:
    assert (await grade(folder_host, task, to("return a + b"))).verdict is Verdict.SOLVED
    found = await grade(folder_host, task, to("return a * b"))
    assert (found.verdict, found.reason) == (Verdict.UNSOLVED, GradeReason.TESTS_FAILED)
    assert [test.status for test in found.tests] == ["failed", "passed"]
    assert "AssertionError" in found.log_tail


async def test_a_log_longer_than_one_commands_output_is_read_whole(
    folder_host: Any, task: Task
) -> None:
    long = to("import sys; sys.stderr.write('x' * 3_000_000 + chr(10)); return a + b")
    assert (await grade(folder_host, task, long)).verdict is Verdict.SOLVED


async def test_ending_the_process_after_printing_a_success_is_not_solved(
    folder_host: Any, task: Task
) -> None:
    lie = "print('test_add (checks.T.test_add) ... ok'); import os; os._exit(0)"
    found = await grade(folder_host, task, to(lie))
    assert (found.verdict, found.reason) == (Verdict.UNSOLVED, GradeReason.TESTS_ABORTED)


async def test_a_sandbox_without_the_scripts_pytest_is_a_fault_that_no_change_can_feign(
    folder_host: Any, task: Task
) -> None:
    assert isinstance(task.grader, LogGrader)
    missing = f"{sys.executable} -c 'raise ImportError(\"No module named pytest\")'"
    script = task.grader.script.replace(f"{sys.executable} -m unittest -v checks", missing)
    broken = dataclasses.replace(task, grader=dataclasses.replace(task.grader, script=script))
    with pytest.raises(FailedPrecondition, match="can't be started") as raised:
        await grade(folder_host, broken, to("return a + b"))
    assert raised.value.metadata[FAULT_CAUSE_KEY] == "SANDBOX"
    lie = to("print('No module named pytest'); import os; os._exit(1)")
    found = await grade(folder_host, task, lie)
    assert found.verdict is Verdict.UNSOLVED


async def test_changes_to_the_scripts_files_are_dropped(folder_host: Any, task: Task) -> None:
    diff = b"diff --git a/checks.py b/checks.py\nnew file mode 100644\n--- /dev/null\n"
    diff += b"+++ b/checks.py\n@@ -0,0 +1 @@\n+x = 1\n"
    assert (await grade(folder_host, task, diff)).reason is GradeReason.ONLY_PROTECTED_FILES


def test_the_repositorys_own_runner_is_known_by_the_command_that_runs_it() -> None:
    script = (
        "git apply - <<'EOF'\n+++ b/src/shop.py\nEOF\n: '>>>>> Start Test Output'\n"
        "bin/test -C --verbose sympy/core/tests/test_x.py && ./run.py --all\n"
        ": '>>>>> End Test Output'\n"
    )
    named = named_in_command(script)
    assert {"bin/test", "run.py", "sympy/core/tests/test_x.py"} <= named
    assert "src/shop.py" not in named
