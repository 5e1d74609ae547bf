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


async def test_one_run_costs_five_calls_and_one_command_and_what_passes_is_run_twice(
    folder_host: Any, make_shop: MakeShop
) -> None:
    run = ["create", "apply_patch", "write_files", "run", "destroy"]
    await grade(folder_host, make_shop(), to(FIXED))
    assert folder_host.calls == run * 2
    folder_host.calls.clear()
    await grade(folder_host, make_shop(), to(BROKEN + "\n"))
    assert folder_host.calls == run
    folder_host.calls.clear()
    await grader(folder_host, controls=False).grade(make_shop(), to(FIXED), attempt="a")
    assert folder_host.calls == run


@pytest.mark.parametrize(
    ("diff", "reason"),
    [
        (b"", GradeReason.EMPTY_DIFF),
        (b"nonsense", GradeReason.DIFF_MALFORMED),
        (b"diff --git a/x b/x\n" + b"#" * 2_000_000, GradeReason.DIFF_TOO_LARGE),
        (diff_of("test_shop.py", "", "def test_x(): pass\n"), GradeReason.ONLY_PROTECTED_FILES),
        (diff_of("../x.py", "", "x = 1\n"), GradeReason.UNSAFE_PATH),
        (b"diff --git a/x b/x\n" + b"#" * (50 << 20), GradeReason.DIFF_TOO_LARGE),
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


async def test_a_binary_change_without_its_bytes_does_not_apply(
    folder_host: Any, make_shop: MakeShop
) -> None:
    told = b"diff --git a/logo b/logo\nnew file mode 100644\nindex 0000000..1111111\n"
    told += b"Binary files /dev/null and b/logo differ\n"
    found = await grade(folder_host, make_shop(), to(FIXED) + told)
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


async def test_forged_records_are_called_tampering(folder_host: Any, make_shop: MakeShop) -> None:
    diff = to(
        BROKEN + "\nimport os\nfor fd in range(64):\n    try:\n"
        "        os.write(fd, bytes(8) + b'\\0\\0\\0p')\n"
        "    except OSError:\n        pass\n"
    )
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


# -- a sandbox that can't run tests says nothing of diff or task -----------------------------------


@pytest.mark.parametrize("reference", [None, Reference(patch=to(FIXED))], ids=["without", "with"])
async def test_a_sandbox_without_pytest_is_a_fault_of_the_set_up(
    folder_host: Any, make_shop: MakeShop, reference: Reference | None
) -> None:
    bare = folder_host.root / "python-without-packages"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    tested = Grader(folder_host, GradingConfig(python=str(bare)))
    task = make_shop(runner=TestRunner.PYTEST, reference=reference, pass_to_pass=())
    gradings = [
        tested.grade(task, to(FIXED), attempt="a"),
        tested.grade_untouched(task, attempt="b"),
    ]
    for grading in gradings:
        with pytest.raises(FailedPrecondition, match=r"local\.site_packages") as caught:
            await grading
        assert "No module named 'pytest'" in caught.value.message
        assert caught.value.metadata["fault_cause"] == "SANDBOX"
    assert tested.faulted == 2


async def test_that_the_interpreter_is_missing_is_seen_also_after_the_task_was_found_sound(
    folder_host: Any, make_shop: MakeShop
) -> None:
    absent = CommandResult(exit_code=127, stdout=b"", stderr=b"python3: not found")
    aborted = CommandResult(exit_code=1, stdout=b"", stderr=b"")
    tested = grader(folder_host)
    task = make_shop(reference=Reference(patch=to(FIXED)))
    plays(folder_host, aborted, None, absent, absent)
    found = await tested.grade(task, to(FIXED + "# ends\n"), attempt="a")
    assert found.reason is GradeReason.TESTS_ABORTED
    with pytest.raises(FailedPrecondition, match="python3: not found"):
        await tested.grade(task, to(FIXED), attempt="b")


async def test_a_diff_that_feigns_a_missing_interpreter_is_unsolved(
    folder_host: Any, make_shop: MakeShop
) -> None:
    task = make_shop(reference=Reference(patch=to(FIXED)))
    found = await grade(folder_host, task, to("import os\n\nos._exit(127)\n"))
    assert (found.verdict, found.reason) == (Verdict.UNSOLVED, GradeReason.TESTS_ABORTED)


# -- altered tests ---------------------------------------------------------------------------------

EQUALS = FIXED.replace("return a + b", "return type('All', (), {'__eq__': lambda s, o: True})()")


async def test_what_passes_whatever_is_expected_is_not_solved(
    folder_host: Any, make_shop: MakeShop
) -> None:
    found = await grade(folder_host, make_shop(), to(EQUALS))
    assert (found.verdict, found.reason) == (Verdict.UNSOLVED, GradeReason.CONTROL_PASSED)
    assert "test_add" in found.detail
    unguarded = await grader(folder_host, controls=False).grade(make_shop(), to(EQUALS), attempt="")
    assert unguarded.verdict is Verdict.SOLVED, "the cheat of this test is none"


async def test_a_test_that_the_reference_passes_though_it_was_altered_proves_nothing(
    folder_host: Any, make_shop: MakeShop
) -> None:
    # Its assertion fails within a try that no alteration looks for: a plug-in, a decorator.
    hidden = (
        "from shop import add\n\n\ndef calm(test):\n    def run():\n        try:\n"
        "            test()\n        except AssertionError:\n            pass\n    return run\n\n\n"
        "@calm\ndef test_add():\n    assert add(20, 3) == 23\n"
    )
    task = make_shop(
        hidden=hidden,
        runner=TestRunner.PYTEST,
        pass_to_pass=(),
        reference=Reference(patch=to(FIXED)),
    )
    tested = grader(folder_host)
    first = await tested.grade(task, to(FIXED + "# mine\n"), attempt="a")
    assert first.verdict is Verdict.SOLVED, first
    folder_host.calls.clear()
    again = await tested.grade(task, to(FIXED + "# mine\n"), attempt="b")
    assert again.verdict is Verdict.SOLVED
    assert folder_host.calls.count("run") == 1, "there is nothing left to alter"


async def test_tests_that_depend_on_those_before_them_are_not_altered_again(
    folder_host: Any, make_shop: MakeShop
) -> None:
    hidden = (
        "from shop import add\n\nseen = []\n\n\ndef test_add():\n"
        "    assert add(20, 3) == 23\n    seen.append(1)\n\n\n"
        "def test_double():\n    if not seen:\n        raise AssertionError\n"
    )
    task = make_shop(hidden=hidden, reference=Reference(patch=to(FIXED)))
    found = await grade(folder_host, task, to(FIXED + "# mine\n"))
    assert found.verdict is Verdict.SOLVED, found


# -- infrastructure --------------------------------------------------------------------------------


STAGES = {
    "create": "START_SANDBOX",
    "apply_patch": "APPLY_DIFF",
    "write_files": "RUN_TESTS",
    "run": "RUN_TESTS",
}


@pytest.mark.parametrize("call", STAGES)
@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        (Reason.UNAVAILABLE, "SANDBOX"),
        (Reason.SANDBOX_GONE, "SANDBOX"),
        (Reason.DISK_FULL, "DISK"),
        (Reason.DEADLINE_EXCEEDED, "DEADLINE"),
        (Reason.QUOTA_EXHAUSTED, "QUOTA"),
        (Reason.INJECTED_FAULT, "INJECTED"),
        (Reason.ENVIRONMENT_UNKNOWN, "IMAGE"),
        (Reason.CHECKSUM_MISMATCH, "NETWORK"),
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
    assert caught.value.metadata["grading_stage"] == STAGES[call]
    assert (tested.graded, tested.faulted) == (0, 1)


async def test_a_host_that_nobody_reaches_is_a_fault_of_the_network(
    folder_host: Any, make_shop: MakeShop
) -> None:
    # What a channel itself says of a peer that does not answer has no domain.
    folder_host.fail["run"] = Unavailable("connection reset", domain="")
    with pytest.raises(ServiceError) as caught:
        await grade(folder_host, make_shop(), to(FIXED))
    assert caught.value.metadata["fault_cause"] == "NETWORK"


@pytest.mark.parametrize("call", STAGES)
async def test_a_lost_sandbox_is_replaced_a_few_times(
    folder_host: Any, make_shop: MakeShop, call: str
) -> None:
    failing = getattr(folder_host, call)
    lost = 2

    async def lose(*args: Any, **kwargs: Any) -> Any:
        nonlocal lost
        if lost:
            lost -= 1
            raise service_error(Reason.SANDBOX_GONE, "gone")
        return await failing(*args, **kwargs)

    setattr(folder_host, call, lose)
    tested = grader(folder_host, retries=2)
    found = await tested.grade(make_shop(), to(FIXED), attempt="a")
    assert found.verdict is Verdict.SOLVED
    assert (tested.graded, tested.faulted) == (1, 0)
    lost = 3
    with pytest.raises(ServiceError) as caught:
        await tested.grade(make_shop(), to(FIXED), attempt="a")
    assert caught.value.reason is Reason.SANDBOX_GONE


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


@pytest.mark.parametrize(
    "said", ["test.sh: 5: pytest: not found", "/usr/bin/python: No module named pytest"]
)
async def test_a_script_without_its_pytest_is_a_fault_of_the_sandbox(
    harbor_host: Any, make_shop: MakeShop, said: str
) -> None:
    script = f"echo '{said}' >&2; echo 0 > /logs/verifier/reward.txt"
    with pytest.raises(FailedPrecondition, match="can't be started"):
        await grade(harbor_host, scripted(make_shop, script), to(FIXED))
    # Where the untouched repository starts its tests it was the change that said so.
    script = f"grep -q 'a + b' shop.py && echo '{said}'; echo 0 > /logs/verifier/reward.txt"
    found = await grade(harbor_host, scripted(make_shop, script), to(FIXED))
    assert (found.verdict, found.reason) == (Verdict.UNSOLVED, GradeReason.REWARD_BELOW_ONE)


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


CHECK = (
    'cd "$(dirname "$0")" && PYTHONPATH=$OLDPWD python3 check.py && mkdir -p /logs/verifier/ '
    "&& echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
)


async def test_a_harbor_script_is_run_with_altered_assertions_too(
    harbor_host: Any, make_shop: MakeShop
) -> None:
    task = scripted(make_shop, CHECK, reference=Reference(patch=to(FIXED)))
    assert isinstance(task.grader, ScriptGrader)
    check = TreeFile(b"from shop import add\nassert add(20, 3) == 23\n")
    files = {**task.grader.files, "check.py": check}
    task = dataclasses.replace(task, grader=dataclasses.replace(task.grader, files=files))
    tested = grader(harbor_host)
    honest = await tested.grade(task, to(FIXED + "# mine\n"), attempt="a")
    assert honest.verdict is Verdict.SOLVED, honest
    cheat = await tested.grade(task, to(EQUALS), attempt="b")
    assert cheat.reason is GradeReason.CONTROL_PASSED, cheat
    broken = await tested.grade(task, to(BROKEN + "\n"), attempt="c")
    assert broken.reason is GradeReason.REWARD_BELOW_ONE


def test_settings_have_the_documented_defaults() -> None:
    config = GradingConfig()
    assert (config.concurrency, config.max_diff_bytes) == (8, 1024 * 1024)
    assert json.loads(config.faults.model_dump_json()) == {"grade_rate": 0.0, "seed": 0}
