"""Grading from a diff to a verdict, in plain folders; what fails on the way is never a verdict."""

import asyncio
import dataclasses
import difflib
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from service_kit.errors import FailedPrecondition, Reason, ServiceError, Unavailable, service_error
from swe_eval.config import FaultInjection, GradingConfig
from swe_eval.core.verdict import GradeReason, TestStatus, Verdict
from swe_eval.grading.host import CommandResult
from swe_eval.grading.run import Grade, Grader
from swe_eval.grading.trial import parse_reward
from swe_eval.tasks.task import Reference, ScriptGrader, Task, TestRunner, TreeFile

MakeShop = Callable[..., Task]
BROKEN = "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return 2 * a\n"
FIXED = BROKEN.replace("a - b", "a + b")


def diff_of(path: str, old: str, new: str) -> bytes:
    source = f"a/{path}" if old else "/dev/null"
    body = "".join(
        difflib.unified_diff(old.splitlines(True), new.splitlines(True), source, f"b/{path}")
    )
    mode = "" if old else "new file mode 100644\n"
    return f"diff --git a/{path} b/{path}\n{mode}{body}".encode()


def to(new: str) -> bytes:
    return diff_of("shop.py", BROKEN, new)


def grader(host: Any, **settings: Any) -> Grader:
    return Grader(host, GradingConfig(python=sys.executable, **settings))


async def grade(host: Any, task: Task, diff: bytes) -> Grade:
    return await grader(host).grade(task, diff, attempt="g/0/0/0")


async def test_the_gold_patch_is_solved_and_the_untouched_repository_is_not(
    folder_host: Any, make_shop: MakeShop
) -> None:
    task = make_shop()
    solved = await grade(folder_host, task, to(FIXED))
    assert (solved.verdict, solved.reason) == (Verdict.SOLVED, GradeReason.NONE)
    assert solved.wall_s >= solved.sandbox_start_s > 0
    nothing = await grade(folder_host, task, to(BROKEN + "\n# looked at it\n"))
    assert (nothing.verdict, nothing.reason) == (Verdict.UNSOLVED, GradeReason.TESTS_FAILED)


async def test_a_repair_that_breaks_another_function_is_unsolved(
    folder_host: Any, make_shop: MakeShop
) -> None:
    found = await grade(folder_host, make_shop(), to(FIXED.replace("2 * a", "3 * a")))
    assert found.reason is GradeReason.TESTS_FAILED
    assert [t.status for t in found.tests] == [TestStatus.PASSED, TestStatus.FAILED]


async def test_one_grading_costs_five_calls_and_one_command(
    folder_host: Any, make_shop: MakeShop
) -> None:
    await grade(folder_host, make_shop(), to(FIXED))
    assert folder_host.calls == ["create", "apply_patch", "write_files", "run", "destroy"]


@pytest.mark.parametrize(
    ("diff", "reason"),
    [
        (b"", GradeReason.EMPTY_DIFF),
        (b"nonsense", GradeReason.DIFF_MALFORMED),
        (b"diff --git a/x b/x\n" + b"#" * 2_000_000, GradeReason.DIFF_TOO_LARGE),
        (diff_of("test_shop.py", "", "def test_x(): pass\n"), GradeReason.ONLY_PROTECTED_FILES),
        (diff_of("../x.py", "", "x = 1\n"), GradeReason.UNSAFE_PATH),
    ],
)
async def test_hopeless_diffs_are_unsolved_without_a_sandbox(
    folder_host: Any, make_shop: MakeShop, diff: bytes, reason: GradeReason
) -> None:
    found = await grade(folder_host, make_shop(), diff)
    assert (found.verdict, found.reason) == (Verdict.UNSOLVED, reason)
    assert {t.status for t in found.tests} == {TestStatus.MISSING}
    assert folder_host.calls == []


async def test_a_diff_that_does_not_apply_is_unsolved(
    folder_host: Any, make_shop: MakeShop
) -> None:
    found = await grade(folder_host, make_shop(), diff_of("shop.py", "other\n", "text\n"))
    assert (found.verdict, found.reason) == (Verdict.UNSOLVED, GradeReason.PATCH_REJECTED)


async def test_a_diff_that_changes_more_than_it_names_is_unsafe(
    folder_host: Any, make_shop: MakeShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def apply(sandbox_id: str, patch: bytes) -> list[str]:
        return ["shop.py", "conftest.py"]

    monkeypatch.setattr(folder_host, "apply_patch", apply)
    found = await grade(folder_host, make_shop(), to(FIXED))
    assert found.reason is GradeReason.UNSAFE_PATH
    assert "run" not in folder_host.calls


CHEATS = {
    "edits the visible test only": diff_of("test_shop.py", "", "def test_double(): pass\n"),
    "replaces the hidden test": to(BROKEN + "\n")
    + diff_of("tests/test_hidden.py", "", "def test_add(): pass\ndef test_double(): pass\n"),
    "prints forged records": to(
        BROKEN
        + "\nimport sys\nfor stream in (sys.stdout, sys.__stdout__, sys.stderr):\n"
        "    for index in ('\\0\\0\\0', '\\0\\0\\1', '\\xff\\xff\\xff'):\n"
        "        stream.write('\\0' * 8 + index + 'p')\n    stream.write('2 passed')\n"
        "    stream.flush()\n"
    ),
    "writes forged records to every descriptor": to(
        BROKEN
        + "\nimport os\nfor fd in range(256):\n    for index in (0, 1, 0xFFFFFF):\n        try:\n"
        "            os.write(fd, bytes(8) + index.to_bytes(3, 'big') + b'p')\n"
        "        except OSError:\n            pass\n"
    ),
    "leaves at once with success": to("import os\nos._exit(0)\n" + BROKEN),
    "leaves inside the first test": to(
        "import os\n\n\ndef add(a, b):\n    os._exit(0)\n\n\ndef double(a):\n    return 2 * a\n"
    ),
    "raises SystemExit on import": to("raise SystemExit(0)\n" + BROKEN),
    "an exit handler that reports success": to(
        BROKEN + "\nimport atexit, os\natexit.register(os._exit, 0)\n"
    ),
    "a conftest that skips everything": to(BROKEN + "\n")
    + diff_of("conftest.py", "", "import pytest\n\n\ndef pytest_collection_modifyitems(items):\n"
              "    for item in items:\n        item.add_marker(pytest.mark.skip)\n"),
    "a conftest that rewrites reports": to(BROKEN + "\n")
    + diff_of("tests/conftest.py", "", "def pytest_runtest_logreport(report):\n"
              "    report.outcome = 'passed'\n"),
    "a pytest.ini that deselects": to(BROKEN + "\n")
    + diff_of("pytest.ini", "", "[pytest]\naddopts = --deselect tests/test_hidden.py::test_add\n"),
    "replaces the test functions": to(
        BROKEN
        + "\nimport sys, threading\n\n\ndef _later():\n    import time\n    for _ in range(200):\n"
        "        module = sys.modules.get('test_hidden')\n        if module is not None:\n"
        "            module.test_add = lambda: None\n        time.sleep(0.001)\n\n\n"
        "threading.Thread(target=_later, daemon=True).start()\nimport time\ntime.sleep(0.05)\n"
    ),
    "gives the test functions another body": to(
        BROKEN.replace(
            "return 2 * a",
            "import sys\n    module = sys.modules['test_hidden']\n"
            "    module.test_add.__code__ = (lambda: None).__code__\n    return 2 * a",
        ).replace("return a - b", "import sys\n    f = sys.modules['test_hidden'].test_add\n"
                  "    f.__code__ = (lambda: None).__code__\n    return a - b")
    ),
    "kills itself": to("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n" + BROKEN),
    "reports from a fork": to(
        "import os\nif os.fork():\n    os._exit(0)\n\n\n" + BROKEN.replace("a - b", "a + b")
    ),
    "patches os.write and json": to(
        "import json, os\njson.dumps = lambda *a, **k: '{}'\n"
        "os.write = lambda fd, data: len(data)\n" + BROKEN
    ),
    "replaces the exception classes": to(
        "import builtins\nbuiltins.AssertionError = builtins.BaseException = type('E', (), {})\n"
        + BROKEN
    ),
    "shadows the library": to(BROKEN + "\n")
    + diff_of("unittest.py", "", "class TestCase: pass\n")
    + diff_of("pytest.py", "", "def main(*a, **k): return 0\n"),
    "runs for ever": to("while True:\n    pass\n"),
}  # fmt: skip


@pytest.mark.parametrize("runner", [TestRunner.FUNCTIONS, TestRunner.PYTEST])
@pytest.mark.parametrize("name", CHEATS)
async def test_cheating_is_never_solved(
    folder_host: Any, make_shop: MakeShop, name: str, runner: TestRunner
) -> None:
    cpu_s = 1 if runner is TestRunner.FUNCTIONS else 3
    task = make_shop(runner=runner, cpu_s=cpu_s, reference=Reference(patch=to(FIXED)))
    found = await grade(folder_host, task, CHEATS[name])
    assert found.verdict is Verdict.UNSOLVED, found


@pytest.mark.parametrize("name", [n for n, diff in CHEATS.items() if diff.count(b"diff --git") > 1])
async def test_files_that_would_cheat_do_no_harm_to_an_honest_repair(
    folder_host: Any, make_shop: MakeShop, name: str
) -> None:
    _, _, beside = CHEATS[name].rpartition(b"diff --git ")
    found = await grade(folder_host, make_shop(), to(FIXED) + b"diff --git " + beside)
    assert found.verdict is Verdict.SOLVED, found


async def test_forged_records_are_called_tampering(folder_host: Any, make_shop: MakeShop) -> None:
    diff = CHEATS["writes forged records to every descriptor"]
    found = await grade(folder_host, make_shop(), diff)
    assert found.reason is GradeReason.RESULT_TAMPERED


# -- limits: the diff is to blame only if the reference keeps them --------------------------------

LATE = CommandResult(exit_code=137, stdout=b"", stderr=b"", timed_out=True)


def plays(host: Any, *answers: CommandResult | None) -> None:
    """Lets the next runs end like this; None really runs."""
    left = list(answers)
    host.answer = lambda argv: left.pop(0)


async def test_a_timeout_counts_when_the_reference_keeps_the_limit_and_that_is_tried_once(
    folder_host: Any, make_shop: MakeShop
) -> None:
    task = make_shop(reference=Reference(patch=to(FIXED)))
    tested = grader(folder_host)
    plays(folder_host, LATE, None, LATE)
    first = await tested.grade(task, to(FIXED + "# slow\n"), attempt="a")
    assert (first.verdict, first.reason) == (Verdict.UNSOLVED, GradeReason.TIMEOUT)
    assert folder_host.created == 2
    await tested.grade(task, to(FIXED + "# slow\n"), attempt="b")
    assert folder_host.created == 3


async def test_a_timeout_that_the_reference_shares_is_a_fault_of_the_task(
    folder_host: Any, make_shop: MakeShop
) -> None:
    task = make_shop(reference=Reference(patch=to(FIXED)))
    plays(folder_host, LATE, LATE)
    with pytest.raises(FailedPrecondition) as caught:
        await grade(folder_host, task, to(FIXED))
    assert caught.value.metadata["fault_cause"] == "TASK"
    assert not caught.value.retryable


async def test_a_reference_that_failed_for_once_is_tried_again_the_next_time(
    folder_host: Any, make_shop: MakeShop
) -> None:
    task = make_shop(reference=Reference(patch=to(FIXED)))
    tested = grader(folder_host)
    plays(folder_host, LATE, LATE, LATE, None)
    with pytest.raises(FailedPrecondition):
        await tested.grade(task, to(FIXED), attempt="a")
    again = await tested.grade(task, to(FIXED), attempt="b")
    assert again.reason is GradeReason.TIMEOUT


async def test_without_a_reference_the_untouched_repositorys_passing_tests_decide(
    folder_host: Any, make_shop: MakeShop
) -> None:
    plays(folder_host, LATE, None)
    found = await grade(folder_host, make_shop(), to(FIXED))
    assert found.reason is GradeReason.TIMEOUT
    plays(folder_host, LATE, LATE)
    with pytest.raises(FailedPrecondition):
        await grade(folder_host, make_shop(), to(FIXED))


async def test_an_endless_loop_is_unsolved_with_the_reference_really_run(
    folder_host: Any, make_shop: MakeShop
) -> None:
    loop = to("def add(a, b):\n    while True:\n        pass\n\n\ndouble = add\n")
    task = make_shop(cpu_s=1, reference=Reference(patch=to(FIXED)))
    assert (await grade(folder_host, task, loop)).reason is GradeReason.TIMEOUT


async def test_running_out_of_memory_is_judged_by_the_reference_too(
    folder_host: Any, make_shop: MakeShop
) -> None:
    task = make_shop(reference=Reference(patch=to(FIXED)))
    answers = [CommandResult(exit_code=137, stdout=b"", stderr=b"", out_of_memory=True)]
    folder_host.answer = lambda argv: answers.pop() if answers else None
    found = await grade(folder_host, task, to(FIXED + "# big\n"))
    assert (found.verdict, found.reason) == (Verdict.UNSOLVED, GradeReason.OUT_OF_MEMORY)


async def test_an_interpreter_that_is_not_there_is_a_fault_and_no_verdict(
    folder_host: Any, make_shop: MakeShop
) -> None:
    folder_host.answer = lambda argv: CommandResult(exit_code=127, stdout=b"", stderr=b"no python")
    with pytest.raises(FailedPrecondition):
        await grade(folder_host, make_shop(reference=Reference(patch=to(FIXED))), to(FIXED))


# -- infrastructure --------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["create", "apply_patch", "write_files", "run"])
@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        (Reason.UNAVAILABLE, "SANDBOX"),
        (Reason.SANDBOX_GONE, "SANDBOX"),
        (Reason.DISK_FULL, "DISK"),
        (Reason.DEADLINE_EXCEEDED, "DEADLINE"),
        (Reason.QUOTA_EXHAUSTED, "QUOTA"),
        (Reason.INJECTED_FAULT, "INJECTED"),
    ],
)
async def test_infrastructure_that_fails_is_an_error_with_its_cause_and_the_sandbox_ends(
    folder_host: Any, make_shop: MakeShop, call: str, reason: Reason, cause: str
) -> None:
    folder_host.fail[call] = service_error(reason, "the host is on fire")
    tested = grader(folder_host)
    with pytest.raises(ServiceError, match="the host is on fire") as caught:
        await tested.grade(make_shop(), to(FIXED), attempt="a")
    assert caught.value.reason is reason
    assert caught.value.metadata["fault_cause"] == cause
    assert (tested.graded, tested.faulted) == (0, 1)


async def test_a_sandbox_that_can_not_be_destroyed_does_not_undo_a_verdict(
    folder_host: Any, make_shop: MakeShop
) -> None:
    folder_host.fail["destroy"] = Unavailable("gone")
    found = await grade(folder_host, make_shop(), to(FIXED))
    assert found.verdict is Verdict.SOLVED
    folder_host.live.clear()


async def test_injected_faults_hit_the_same_share_of_attempts_every_time(
    folder_host: Any, make_shop: MakeShop
) -> None:
    tested = grader(folder_host, faults=FaultInjection(grade_rate=0.1, seed=3))
    hit = []
    for i in range(200):
        try:
            await tested.grade(make_shop(), b"", attempt=f"g-{i}/0/0/0")
        except ServiceError as error:
            hit.append(i)
            causes = {error.reason, error.metadata["fault_cause"]}
    assert causes == {Reason.INJECTED_FAULT, "INJECTED"}
    assert 8 <= len(hit) <= 35
    again = grader(folder_host, faults=FaultInjection(grade_rate=0.1, seed=3))
    with pytest.raises(ServiceError):
        await again.grade(make_shop(), b"", attempt=f"g-{hit[0]}/0/0/0")


async def test_gradings_beyond_the_limit_wait_in_a_line_that_can_be_seen(
    folder_host: Any, make_shop: MakeShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, gate = asyncio.Event(), asyncio.Event()

    async def run(*args: object, **kwargs: object) -> CommandResult:
        started.set()
        await gate.wait()
        return CommandResult(exit_code=1, stdout=b"", stderr=b"")

    monkeypatch.setattr(folder_host, "run", run)
    tested = grader(folder_host, concurrency=1, max_waiting=1)
    task = make_shop(fail_to_pass=("tests/test_hidden.py::test_add",), pass_to_pass=())
    async with asyncio.TaskGroup() as group:
        first = group.create_task(tested.grade(task, to(FIXED), attempt="a"))
        await started.wait()
        second = group.create_task(tested.grade(task, to(FIXED), attempt="b"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (tested.limiter.in_use, tested.limiter.waiting) == (1, 1)
        with pytest.raises(ServiceError) as caught:
            await tested.grade(task, to(FIXED), attempt="c")
        assert caught.value.reason is Reason.QUOTA_EXHAUSTED
        assert caught.value.retryable
        gate.set()
        await asyncio.wait([first, second])
    assert (tested.limiter.in_use, tested.limiter.waiting) == (0, 0)


async def test_a_cancelled_grading_gives_back_its_sandbox_and_its_place(
    folder_host: Any, make_shop: MakeShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = asyncio.Event()

    async def run(*args: object, **kwargs: object) -> CommandResult:
        began.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(folder_host, "run", run)
    tested = grader(folder_host)
    attempt = asyncio.ensure_future(tested.grade(make_shop(), to(FIXED), attempt="a"))
    await began.wait()
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    assert folder_host.live == {}
    assert tested.limiter.in_use == 0


# -- Harbor's test.sh ------------------------------------------------------------------------------


def scripted(make_shop: MakeShop, script: str, **changes: Any) -> Task:
    task = make_shop()
    files = {"test.sh": TreeFile(f"#!/bin/sh\n{script}\n".encode())}
    return dataclasses.replace(
        task, grader=ScriptGrader(files=files, env={"GREETING": "hi"}, wall_s=20.0), **changes
    )


@pytest.fixture
def harbor_host(folder_host: Any, tmp_path: Any) -> Any:
    """Maps /tests, /solution and /logs into the temporary folder."""
    write, run = folder_host.write_files, folder_host.run

    def moved(path: str) -> str:
        return path if path.startswith("/tmp/") else f"{tmp_path}{path}"

    async def write_files(sandbox_id: str, folder: str, files: Any) -> None:
        text = {
            p: TreeFile(f.content.replace(b"/logs/", f"{tmp_path}/logs/".encode()), f.executable)
            for p, f in files.items()
        }
        await write(sandbox_id, moved(folder), text)

    async def run_command(sandbox_id: str, argv: Any, **options: Any) -> CommandResult:
        argv = [a.replace("/logs/", f"{tmp_path}/logs/") for a in argv]
        result: CommandResult = await run(sandbox_id, [*argv[:3], *map(moved, argv[3:])], **options)
        return result

    folder_host.write_files, folder_host.run = write_files, run_command
    return folder_host


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (b"1\n", 1.0),
        (b" 0.25 ", 0.25),
        (b'{"reward": 1, "style": 0}', 1.0),
        (b'{"style": 0.5, "tests": 1}', 0.5),
        (b"", None),
        (b"passed", None),
        (b"nan", None),
        (b"NaN", None),
        (b"Infinity", None),
        (b"true", None),
        (b"{}", None),
        (b'{"reward": "1"}', None),
        (b"[1]", None),
        (b"\xff", None),
    ],
)
def test_rewards_are_finite_numbers_or_nothing(text: bytes, reward: float | None) -> None:
    assert parse_reward(text) == reward


@pytest.mark.parametrize(
    ("script", "verdict", "reason"),
    [
        ("echo 1 > /logs/verifier/reward.txt", Verdict.SOLVED, GradeReason.NONE),
        ("echo 1.0 > /logs/verifier/reward.txt; exit 1", Verdict.SOLVED, GradeReason.NONE),
        ("echo 0 > /logs/verifier/reward.txt", Verdict.UNSOLVED, GradeReason.REWARD_BELOW_ONE),
        ("echo 0.5 > /logs/verifier/reward.txt", Verdict.UNSOLVED, GradeReason.REWARD_BELOW_ONE),
        (
            "cd /logs/verifier/; echo 1 > reward.txt; echo '{\"reward\": 0}' > reward.json",
            Verdict.UNSOLVED,
            GradeReason.REWARD_BELOW_ONE,
        ),
        (
            'test "$GREETING" = hi && grep "a + b" shop.py && echo 1 > /logs/verifier/reward.txt',
            Verdict.SOLVED,
            GradeReason.NONE,
        ),
    ],
)
async def test_a_harbor_script_decides_by_its_reward(
    harbor_host: Any, make_shop: MakeShop, script: str, verdict: Verdict, reason: GradeReason
) -> None:
    found = await grade(harbor_host, scripted(make_shop, script), to(FIXED))
    assert (found.verdict, found.reason) == (verdict, reason), found


async def test_a_script_without_a_reward_is_unsolved_when_the_solution_earns_one(
    harbor_host: Any, make_shop: MakeShop
) -> None:
    solution = Reference(files={"solve.sh": TreeFile(b"#!/bin/sh\ntouch done\n")})
    script = "test -f done && echo 1 > /logs/verifier/reward.txt"
    task = scripted(make_shop, script, reference=solution)
    found = await grade(harbor_host, task, to(FIXED))
    assert (found.verdict, found.reason) == (Verdict.UNSOLVED, GradeReason.NO_REWARD)


async def test_a_script_that_never_gives_a_reward_is_a_fault_of_the_task(
    harbor_host: Any, make_shop: MakeShop
) -> None:
    solution = Reference(files={"solve.sh": TreeFile(b"#!/bin/sh\ntouch done\n")})
    with pytest.raises(FailedPrecondition):
        await grade(harbor_host, scripted(make_shop, "true", reference=solution), to(FIXED))


def test_settings_have_the_documented_defaults() -> None:
    config = GradingConfig()
    assert (config.concurrency, config.max_diff_bytes) == (8, 1024 * 1024)
    assert json.loads(config.faults.model_dump_json()) == {"grade_rate": 0.0, "seed": 0}
