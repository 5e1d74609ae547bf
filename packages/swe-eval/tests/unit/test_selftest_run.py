"""The self-test's shell: what is graded how often, what is tried again, how it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from service_kit.errors import FailedPrecondition, Reason, ServiceError, service_error
from swe_eval.config import GradingConfig
from swe_eval.core.selftest import Flaw, Outcome
from swe_eval.core.verdict import GradeReason, Verdict
from swe_eval.grading.faults import FAULT_CAUSE_KEY, GRADE_REASON_KEY
from swe_eval.grading.limiter import Limiter
from swe_eval.grading.run import Grade, Grader
from swe_eval.selftest import SelfTest, untested
from swe_eval.tasks.digest import task_digest
from swe_eval.tasks.selftest_file import Record, SelfTestFile
from swe_eval.tasks.task import Reference, ScriptGrader, Task, TreeFile

SOLVED = Grade(verdict=Verdict.SOLVED, reason=GradeReason.NONE)
UNSOLVED = Grade(verdict=Verdict.UNSOLVED, reason=GradeReason.TESTS_FAILED)
LOST = service_error(Reason.SANDBOX_GONE, "lost", metadata={FAULT_CAUSE_KEY: "SANDBOX"})

Make = Callable[..., Task]


class Graders:
    """Stands in for a grader: answers by the script of each kind of grading, then as is right."""

    def __init__(self, at_once: int = 2) -> None:
        self.limiter = Limiter(at_once, max_waiting=9, clock=lambda: 0.0)
        self.script: dict[str, list[Grade | ServiceError]] = {"gold": [], "empty": []}
        self.attempts: list[str] = []
        self.running = self.most = 0

    async def grade_reference(self, task: Task, *, attempt: str) -> Grade:
        return await self.answer("gold", SOLVED, attempt)

    async def grade_untouched(self, task: Task, *, attempt: str) -> Grade:
        return await self.answer("empty", UNSOLVED, attempt)

    async def answer(self, kind: str, right: Grade, attempt: str) -> Grade:
        self.attempts.append(attempt)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        found = self.script[kind].pop(0) if self.script[kind] else right
        if isinstance(found, ServiceError):
            raise found
        return found


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SelfTestFile]:
    opened = SelfTestFile(tmp_path / "selftest.jsonl")
    yield opened
    opened.close()


@pytest.fixture
def task(make_shop: Make) -> Task:
    return make_shop(reference=Reference(patch=b"x"))


async def found(graders: Any, file: SelfTestFile, *tasks: Task, **options: Any) -> list[Record]:
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)

    graders.pauses = pauses
    test = SelfTest(graders, file, clock=lambda: 0.0, sleep=sleep, **options)
    return [record async for record in test.run(tasks)]


async def test_reference_and_no_change_are_graded_as_often_as_asked(
    file: SelfTestFile, task: Task
) -> None:
    graders = Graders()
    (record,) = await found(graders, file, task, repeat=3)
    assert record.decision.outcome is Outcome.KEPT
    assert graders.attempts == [
        f"shop-1/{kind}-{number}/1" for number in range(3) for kind in ("gold", "empty")
    ]
    assert file.records == {"shop-1": record}


async def test_without_a_reference_nothing_is_run(file: SelfTestFile, make_shop: Make) -> None:
    graders = Graders()
    (record,) = await found(graders, file, make_shop())
    assert [finding.flaw for finding in record.decision.findings] == [Flaw.NO_REFERENCE]
    assert graders.attempts == []


async def test_a_fault_is_tried_again_and_says_nothing_of_the_task(
    file: SelfTestFile, task: Task
) -> None:
    graders = Graders()
    graders.script["empty"] = [LOST, LOST]
    (record,) = await found(graders, file, task)
    assert record.decision.outcome is Outcome.KEPT
    assert graders.attempts[1:4] == [f"shop-1/empty-0/{number}" for number in (1, 2, 3)]
    assert graders.pauses == [1.0, 2.0]  # type: ignore[attr-defined]


async def test_a_fault_that_stays_is_told_apart_and_tested_again_the_next_time(
    file: SelfTestFile, task: Task
) -> None:
    graders = Graders()
    graders.script["gold"] = [LOST] * 3
    (record,) = await found(graders, file, task)
    assert record.decision.outcome is Outcome.FAULT
    assert record.decision.fault is not None
    assert record.decision.fault.cause == "SANDBOX"
    assert untested([task], file, repeat=2) == ([task], [])
    (again,) = await found(graders, file, task)
    assert again.decision.outcome is Outcome.KEPT
    assert untested([task], file, repeat=2) == ([], [again])


async def test_what_a_retry_cannot_mend_is_not_tried_again(file: SelfTestFile, task: Task) -> None:
    graders = Graders()
    graders.script["gold"] = [FailedPrecondition("no image", metadata={FAULT_CAUSE_KEY: "IMAGE"})]
    (record,) = await found(graders, file, task)
    assert record.decision.fault is not None
    assert (record.decision.fault.cause, len(graders.attempts)) == ("IMAGE", 1)


async def test_a_reference_that_its_own_limits_stop_is_a_flaw_of_the_task(
    file: SelfTestFile, task: Task
) -> None:
    graders = Graders()
    metadata = {FAULT_CAUSE_KEY: "TASK", GRADE_REASON_KEY: "timeout"}
    graders.script["gold"] = [FailedPrecondition("too slow", metadata=metadata)] * 2
    (record,) = await found(graders, file, task)
    assert [finding.flaw for finding in record.decision.findings] == [Flaw.GOLD_EXCEEDS_LIMITS]


async def test_what_ran_out_of_time_beside_others_is_tested_again_alone(
    file: SelfTestFile, task: Task
) -> None:
    graders = Graders(at_once=2)
    metadata = {FAULT_CAUSE_KEY: "TASK", GRADE_REASON_KEY: "timeout"}
    slow = FailedPrecondition("too slow", metadata=metadata)
    # Both times, of both tasks; and of one of them alone, too.
    graders.script["gold"] = [slow, slow, slow, slow, SOLVED, SOLVED, slow, slow]
    tasks = [replace(task, task_id=f"shop-{number}") for number in range(2)]
    records = await found(graders, file, *tasks)
    outcomes = [record.decision.outcome for record in records]
    assert outcomes == [Outcome.KEPT, Outcome.QUARANTINED]
    assert file.records == {record.task_id: record for record in records}
    alone = [attempt.partition("/")[0] for attempt in graders.attempts[8:]]
    assert alone == [records[0].task_id] * 4 + [records[1].task_id] * 4


async def test_no_more_tasks_are_tested_at_once_than_the_grader_takes(
    file: SelfTestFile, task: Task
) -> None:
    graders = Graders(at_once=2)
    tasks = [replace(task, task_id=f"shop-{number}") for number in range(5)]
    records = await found(graders, file, *tasks)
    assert {record.task_id for record in records} == {f"shop-{n}" for n in range(5)}
    assert graders.most == 2


async def test_stopped_in_between_it_keeps_what_was_decided(file: SelfTestFile, task: Task) -> None:
    graders = Graders(at_once=1)
    other = replace(task, task_id="other")
    test = SelfTest(graders, file)  # type: ignore[arg-type]
    async for _ in test.run([task, other]):
        break
    todo, known = untested([task, other], file, repeat=2)
    assert ([t.task_id for t in todo], [r.task_id for r in known]) == (["other"], ["shop-1"])


def test_the_digest_is_of_all_that_grading_depends_on(make_shop: Make) -> None:
    def digest(**changes: Any) -> str:
        return task_digest(make_shop(**changes))

    assert digest() == digest()
    others: list[dict[str, Any]] = [
        {"wall_s": 21.0},
        {"cpu_s": 11},
        {"hidden": "def test_add(): pass\n"},
        {"pass_to_pass": ()},
        {"reference": Reference(patch=b"x")},
        {"reference": Reference(files={"solve.sh": TreeFile(b"x")})},
        {"reference": Reference(files={"solve.sh": TreeFile(b"x", executable=True)})},
        {"workdir": "/elsewhere"},
    ]
    found = {digest(), *(digest(**change) for change in others)}
    assert len(found) == len(others) + 1


# -- the gradings themselves


def fix(text: str) -> bytes:
    return (
        "diff --git a/shop.py b/shop.py\n--- a/shop.py\n+++ b/shop.py\n@@ -1,3 +1,3 @@\n"
        f" def add(a, b):\n-    return a - b\n+    {text}\n \n"
    ).encode()


async def test_a_patch_is_graded_as_an_agents_is(folder_host: Any, make_shop: Make) -> None:
    grader = Grader(folder_host, GradingConfig())
    good = make_shop(reference=Reference(patch=fix("return a + b")))
    assert (await grader.grade_reference(good, attempt="a")).verdict is Verdict.SOLVED
    protected = fix("return a + b").replace(b"shop.py", b"test_shop.py")
    bad = await grader.grade_reference(make_shop(reference=Reference(patch=protected)), attempt="a")
    assert bad.reason is GradeReason.ONLY_PROTECTED_FILES


async def test_no_change_is_graded_by_a_run(folder_host: Any, make_shop: Make) -> None:
    grader = Grader(folder_host, GradingConfig())
    found = await grader.grade_untouched(make_shop(), attempt="a")
    assert found.reason is GradeReason.TESTS_FAILED
    assert [(t.name, str(t.status)) for t in found.tests] == [
        ("tests/test_hidden.py::test_add", "failed"),
        ("tests/test_hidden.py::test_double", "passed"),
    ]
    easy = make_shop(hidden="def test_add(): pass\n\n\ndef test_double(): pass\n")
    assert (await grader.grade_untouched(easy, attempt="a")).verdict is Verdict.SOLVED
    assert grader.graded == 2


async def test_a_solution_that_is_a_script_is_graded_by_its_diff(
    folder_host: Any, make_shop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does beside the work folder is out of an agent's reach, and so of its own."""
    solve = {"solve.sh": TreeFile(b"")}
    task = make_shop(reference=Reference(files=solve, patch=b""))
    assert not isinstance(task.grader, ScriptGrader)
    grader = Grader(folder_host, GradingConfig())

    async def edit(task: Task, reference: Reference, sandbox_id: str) -> None:
        text = "def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return 2 * a\n"
        folder_host.put(sandbox_id, "shop.py", text)

    monkeypatch.setattr(type(grader._trial), "solve", lambda self, *a: edit(*a))
    found = await grader.grade_reference(task, attempt="a")
    assert found.verdict is Verdict.SOLVED, found
    assert folder_host.calls.count("diff") == 1
    assert folder_host.calls.count("apply_patch") == 2, "the tests, and the altered ones"
