"""EvalService over a real channel, with real sandboxes behind it."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sandbox_client import EnvironmentTree
from service_kit.channel import ChannelConfig
from service_kit.errors import (
    InvalidArgument,
    NotFound,
    Reason,
    ServiceError,
    Unavailable,
)
from swe_eval.config import FaultInjection, GradingConfig, HarborSetConfig
from swe_eval.generate import GeneratedTask, make_task, to_harbor
from tailrace.common.v1 import outcome_pb2, version_pb2
from tailrace.eval.v1 import eval_service_pb2 as pb

if TYPE_CHECKING:
    from tailrace.eval.v1.eval_service_pb2_grpc import EvalServiceAsyncStub as Stub

SOLVED, UNSOLVED = outcome_pb2.VERDICT_SOLVED, outcome_pb2.VERDICT_UNSOLVED


async def requests(
    task_id: str, diff: bytes, *, chunk: int = 100, group_id: str = "g"
) -> AsyncIterator[pb.GradeRequest]:
    attempt = version_pb2.AttemptId(group_id=group_id, assignment_epoch=0, index=1)
    yield pb.GradeRequest(header=pb.GradeHeader(task_id=task_id, attempt=attempt))
    for start in range(0, len(diff), chunk):
        yield pb.GradeRequest(diff_chunk=diff[start : start + chunk])


async def grade(stub: Stub, task_id: str, diff: bytes, group_id: str = "g") -> pb.GradeResponse:
    response = await stub.Grade(requests(task_id, diff, group_id=group_id), timeout=60)
    assert isinstance(response, pb.GradeResponse)
    return response


# -- tasks -----------------------------------------------------------------------------------------


async def test_sets_are_listed_with_their_sizes(eval_stub: Stub) -> None:
    response = await eval_stub.ListTaskSets(pb.ListTaskSetsRequest())
    assert [(s.name, s.tasks, s.generated) for s in response.task_sets] == [
        ("train", 50, True),
        ("heldout", 20, True),
    ]


async def test_pages_cover_a_set_once_in_order(eval_stub: Stub) -> None:
    seen: list[str] = []
    token = ""
    while True:
        page = await eval_stub.ListTasks(
            pb.ListTasksRequest(task_set="train", page_size=20, page_token=token)
        )
        seen += [task.task_id for task in page.tasks]
        token = page.next_page_token
        if not token:
            break
    assert seen == [make_task("train", i).task_id for i in range(50)]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"task_set": "nope"}, NotFound),
        ({"page_token": "x"}, InvalidArgument),
        ({"page_token": "-1"}, InvalidArgument),
        ({"page_size": 1001}, InvalidArgument),
        ({"page_size": -1}, InvalidArgument),
    ],
)
async def test_a_wrong_listing_is_refused(
    eval_stub: Stub, changes: dict[str, str], error: type[ServiceError]
) -> None:
    request = pb.ListTasksRequest(**{"task_set": "train", **changes})  # type: ignore[arg-type]
    with pytest.raises(error):
        await eval_stub.ListTasks(request)


async def test_what_an_agent_sees_holds_nothing_of_the_hidden_side(eval_stub: Stub) -> None:
    for number in range(10):
        made = make_task("train", number)
        response = await eval_stub.GetTask(pb.GetTaskRequest(task_id=made.task_id))
        task = response.task
        assert (task.instruction, task.repository, task.kind) == (
            made.instruction,
            made.repository,
            made.kind,
        )
        archive = await environment(eval_stub, task.environment.digest)
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            files = {
                m.name: (tar.extractfile(m) or io.BytesIO()).read()
                for m in tar.getmembers()
                if m.isfile()
            }
        assert {path: text.decode() for path, text in files.items()} == dict(made.files)
        on_the_wire = response.SerializeToString() + archive
        for secret in secrets_of(made):
            assert secret.encode() not in on_the_wire, secret


def secrets_of(made: GeneratedTask) -> list[str]:
    """Pieces of the hidden side that the open side must not contain."""
    hidden = "".join(made.hidden_tests.values())
    repaired = [line[1:].strip() for line in made.gold_patch.splitlines() if line.startswith("+ ")]
    unseen = "".join(made.files.values())
    return [
        *made.hidden_tests,
        *(name.partition("::")[2] for name in (*made.fail_to_pass, *made.pass_to_pass)),
        *(line for line in hidden.splitlines() if "assert" in line),
        *(line for line in repaired if len(line) > 12 and line not in unseen),
        made.gold_patch,
    ]


async def environment(stub: Stub, digest: str) -> bytes:
    call = stub.GetEnvironment(pb.GetEnvironmentRequest(digest=digest), timeout=30)
    return b"".join([response.tar_chunk async for response in call])


async def test_the_recipe_names_the_tree_by_the_sandbox_services_digest(eval_stub: Stub) -> None:
    made = make_task("heldout", 3)
    response = await eval_stub.GetTask(pb.GetTaskRequest(task_id=made.task_id))
    recipe = response.task.environment
    tree = EnvironmentTree({path: text.encode() for path, text in made.files.items()})
    assert recipe.digest == tree.digest
    assert recipe.WhichOneof("source") == "tree"
    assert (recipe.workdir, recipe.network) == ("/workspace", False)
    assert response.task.command_timeout_s == 10.0


async def test_an_unknown_task_or_environment_is_not_found(eval_stub: Stub) -> None:
    with pytest.raises(NotFound, match="ListTasks"):
        await eval_stub.GetTask(pb.GetTaskRequest(task_id="nope"))
    with pytest.raises(NotFound, match="GetTask"):
        await environment(eval_stub, "0" * 64)
    with pytest.raises(NotFound):
        await grade(eval_stub, "nope", b"")


# -- grading ---------------------------------------------------------------------------------------


async def test_gold_patches_are_solved_and_looking_around_is_not(eval_stub: Stub) -> None:
    for number in range(13):  # one of each kind of bug
        made = make_task("heldout", number)
        solved = await grade(eval_stub, made.task_id, made.gold_patch.encode())
        assert (solved.verdict, solved.reason) == (SOLVED, ""), (made.task_id, solved)
        assert {(t.required, t.status) for t in solved.tests} == {(True, "passed")}
        note = b"diff --git a/n.txt b/n.txt\nnew file mode 100644\n--- /dev/null\n+++ b/n.txt\n"
        looked = await grade(eval_stub, made.task_id, note + b"@@ -0,0 +1 @@\n+seen\n")
        assert (looked.verdict, looked.reason) == (UNSOLVED, "tests_failed"), made.task_id
        failed = {t.name for t in looked.tests if t.status != "passed"}
        assert failed == set(made.fail_to_pass)


async def test_gradings_side_by_side_do_not_disturb_each_other(eval_stub: Stub) -> None:
    made = [make_task("train", number) for number in range(12)]
    responses = await asyncio.gather(
        *(
            grade(eval_stub, task.task_id, task.gold_patch.encode() if i % 2 else b"")
            for i, task in enumerate(made)
        )
    )
    assert [r.verdict for r in responses] == [UNSOLVED, SOLVED] * 6
    status = await eval_stub.GetStatus(pb.GetStatusRequest())
    assert (status.graded, status.grade_faults) == (12, 0)
    assert (status.grading, status.grade_queue, status.grade_limit) == (0, 0, 8)
    assert status.tasks == 70


def append(made: GeneratedTask, text: str) -> bytes:
    """A diff that adds lines to the end of the broken module and repairs nothing."""
    old = made.files[made.module]
    last = old.splitlines()[-1]
    count = len(old.splitlines())
    added = text.splitlines()
    body = "".join(f"+{line}\n" for line in added)
    return (
        f"diff --git a/{made.module} b/{made.module}\n--- a/{made.module}\n+++ b/{made.module}\n"
        f"@@ -{count} +{count},{len(added) + 1} @@\n {last}\n{body}"
    ).encode()


async def test_what_the_tested_code_leaves_running_is_not_waited_for(eval_stub: Stub) -> None:
    made = make_task("train", 4)
    lingers = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n    os._exit(0)"
    )
    response = await grade(eval_stub, made.task_id, append(made, lingers))
    # The set's wall clock is 5 s: with it the reason would be a timeout.
    assert (response.verdict, response.reason) == (UNSOLVED, "tests_failed")


async def test_changes_of_tests_are_dropped_beside_an_honest_repair(eval_stub: Stub) -> None:
    made = make_task("train", 4)
    conftest = (
        b"diff --git a/conftest.py b/conftest.py\nnew file mode 100644\n--- /dev/null\n"
        b"+++ b/conftest.py\n@@ -0,0 +1 @@\n+raise SystemExit(0)\n"
    )
    honest = await grade(eval_stub, made.task_id, made.gold_patch.encode() + conftest)
    assert honest.verdict == SOLVED
    only = await grade(eval_stub, made.task_id, conftest)
    assert (only.verdict, only.reason) == (UNSOLVED, "only_protected_files")


async def test_a_diff_over_the_limit_is_unsolved_before_all_of_it_has_come(eval_stub: Stub) -> None:
    diff = b"diff --git a/x b/x\n" + b"#" * (3 << 20)
    response = await eval_stub.Grade(
        requests(make_task("train", 0).task_id, diff, chunk=1 << 16), timeout=60
    )
    assert (response.verdict, response.reason) == (UNSOLVED, "diff_too_large")


@pytest.mark.parametrize(
    "stream",
    [
        [],
        [pb.GradeRequest(diff_chunk=b"x")],
        [pb.GradeRequest(header=pb.GradeHeader(task_id="train-00000-operator-change"))] * 2,
    ],
)
async def test_a_grade_stream_that_breaks_the_contract_is_refused(
    eval_stub: Stub, stream: list[pb.GradeRequest]
) -> None:
    async def send() -> AsyncIterator[pb.GradeRequest]:
        for request in stream:
            yield request

    with pytest.raises(InvalidArgument):
        await eval_stub.Grade(send(), timeout=60)


async def test_an_injected_fault_arrives_as_an_error_with_its_cause(start_eval: Any) -> None:
    eval_stub = await start_eval(grading=GradingConfig(faults=FaultInjection(grade_rate=1.0)))
    made = make_task("train", 0)
    with pytest.raises(ServiceError) as caught:
        await grade(eval_stub, made.task_id, made.gold_patch.encode())
    assert caught.value.reason is Reason.INJECTED_FAULT
    assert caught.value.metadata["fault_cause"] == "INJECTED"
    status = await eval_stub.GetStatus(pb.GetStatusRequest())
    assert (status.graded, status.grade_faults) == (0, 1)


async def test_without_a_sandbox_service_grading_is_an_error_and_no_verdict(
    start_eval: Any,
) -> None:
    eval_stub = await start_eval(sandbox=ChannelConfig(target="127.0.0.1:9"))
    made = make_task("train", 0)
    with pytest.raises(Unavailable) as caught:
        await grade(eval_stub, made.task_id, made.gold_patch.encode())
    assert caught.value.metadata["fault_cause"] == "NETWORK"
    assert caught.value.metadata["grading_stage"] == "START_SANDBOX"
    assert caught.value.retryable


# -- Harbor ----------------------------------------------------------------------------------------

TASK_TOML = """\
schema_version = "1.4"
[task]
name = "org/greeting"
[verifier]
timeout_sec = 30
[environment]
workdir = "/app"
"""


@pytest.fixture
async def harbor_stub(start_eval: Any, sandbox_target: str, tmp_path: Path) -> Stub:
    """Serves a scripted task, a generated one from its directory, and a malformed one."""
    files = {
        "greeting/task.toml": TASK_TOML,
        "greeting/instruction.md": "Write hello into greeting.txt.",
        "greeting/environment/Dockerfile": "FROM x\nWORKDIR /app\nCOPY repo/ /app/\n",
        "greeting/environment/repo/README": "nothing here\n",
        "greeting/tests/test.sh": "#!/bin/sh\n. /tests/wanted\n"
        'if [ "$(cat /app/greeting.txt)" = "$WANTED" ]; then echo 1; else echo 0; fi'
        " > /logs/verifier/reward.txt\n",
        "greeting/tests/wanted": "WANTED=hello\n",
        "greeting/solution/solve.sh": "#!/bin/sh\necho hello > greeting.txt\n",
        "malformed/task.toml": "schema_version = 3\n",
    }
    folder = tmp_path / "tasks"
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    to_harbor(make_task("train", 5), folder)
    fancy = to_harbor(make_task("train", 6), folder)
    hidden = fancy / "tests" / "hidden" / "test_hidden.py"
    hidden.write_text(hidden.read_text().replace("():", "(tmp_path):"))
    stub: Stub = await start_eval(
        sandbox=ChannelConfig(target=sandbox_target),
        task_sets=[HarborSetConfig(name="h", path=folder, environment="tree")],
    )
    return stub


def writes(path: str, text: str) -> bytes:
    return (
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
        f"@@ -0,0 +1 @@\n+{text}\n"
    ).encode()


async def test_harbor_tasks_are_served_and_a_malformed_one_is_left_out(harbor_stub: Stub) -> None:
    page = await harbor_stub.ListTasks(pb.ListTasksRequest(task_set="h"))
    made = make_task("train", 5)
    ids = [task.task_id for task in page.tasks]
    assert ids[:2] == ["org/greeting", f"tailrace/{made.task_id}"]
    assert len(ids) == 3
    response = await harbor_stub.GetTask(pb.GetTaskRequest(task_id="org/greeting"))
    assert response.task.environment.workdir == "/app"
    archive = await environment(harbor_stub, response.task.environment.digest)
    on_the_wire = response.SerializeToString() + archive
    for secret in (b"WANTED", b"reward", b"solve.sh", b"echo hello"):
        assert secret not in on_the_wire


async def test_a_harbor_script_judges_the_diff_in_a_real_sandbox(harbor_stub: Stub) -> None:
    right = await grade(harbor_stub, "org/greeting", writes("greeting.txt", "hello"))
    assert (right.verdict, right.reason) == (SOLVED, ""), right
    wrong = await grade(harbor_stub, "org/greeting", writes("greeting.txt", "bye"))
    assert (wrong.verdict, wrong.reason) == (UNSOLVED, "reward_below_one")


async def test_a_generated_task_grades_the_same_from_its_harbor_directory(
    harbor_stub: Stub,
) -> None:
    made = make_task("train", 5)
    solved = await grade(harbor_stub, f"tailrace/{made.task_id}", made.gold_patch.encode())
    assert solved.verdict == SOLVED, solved
    nothing = await grade(harbor_stub, f"tailrace/{made.task_id}", writes("note.txt", "seen"))
    assert (nothing.verdict, nothing.reason) == (UNSOLVED, "tests_failed")


async def test_a_task_that_needs_pytest_gets_it(harbor_stub: Stub) -> None:
    made = make_task("train", 6)
    gold = made.gold_patch.encode()
    response = await grade(harbor_stub, f"tailrace/{made.task_id}", gold)
    assert response.verdict == SOLVED, response
