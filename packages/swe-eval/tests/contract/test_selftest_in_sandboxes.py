"""The self-test in real sandboxes: good tasks are kept, and each kind of bad one is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandbox_client import SandboxClient
from service_kit.channel import ChannelConfig
from swe_eval.config import GradingConfig
from swe_eval.core.selftest import Flaw, Outcome
from swe_eval.generate import make_task
from swe_eval.grading.run import Grader
from swe_eval.grading.sandboxes import ServiceHost
from swe_eval.selftest import SelfTest
from swe_eval.tasks.generated import from_generated
from swe_eval.tasks.selftest_file import Record, SelfTestFile
from swe_eval.tasks.task import Environment, Reference, ScriptGrader, Task, TestGrader, TreeFile


async def self_test(
    target: str, folder: Path, tasks: Sequence[Task], **settings: Any
) -> dict[str, Record]:
    config = GradingConfig(concurrency=4, **settings)
    async with SandboxClient(ChannelConfig(target=target), owner="selftest") as client:
        grader = Grader(ServiceHost(client, start_timeout_s=30.0), config)
        file = SelfTestFile(folder / "selftest.jsonl")
        try:
            return {r.task_id: r async for r in SelfTest(grader, file, tries=1).run(tasks)}
        finally:
            file.close()


MADE = make_task("train", 0)
GOOD = from_generated(MADE, wall_s=5.0, cpu_s=2, command_timeout_s=0)
README = (
    b"diff --git a/NOTES b/NOTES\nnew file mode 100644\n--- /dev/null\n+++ b/NOTES\n"
    b"@@ -0,0 +1 @@\n+mended\n"
)


def named(name: str, task: Task = GOOD, **changes: object) -> Task:
    return replace(task, task_id=name, **changes)  # type: ignore[arg-type]


def judged_by(name: str, source: str, *tests: str, wall_s: float = 5.0) -> Task:
    """The good task with other hidden tests."""
    assert isinstance(GOOD.grader, TestGrader)
    grader = replace(
        GOOD.grader,
        files={"tests/test_other.py": source},
        fail_to_pass=tuple(f"tests/test_other.py::{test}" for test in tests),
        pass_to_pass=(),
        wall_s=wall_s,
    )
    return named(name, grader=grader)


def scripted(name: str, solution: str) -> Task:
    """A task of a Harbor kind: a script has to leave a file in the work folder."""
    check = (
        "mkdir -p /logs/verifier\n"
        "if [ -f answer ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt\n"
    )
    return Task(
        task_id=name,
        repository="answers",
        instruction="Leave an answer.",
        environment=Environment(files={"question": TreeFile(b"?\n")}),
        grader=ScriptGrader(
            files={"test.sh": TreeFile(f"#!/bin/sh\n{check}".encode())}, wall_s=5.0
        ),
        reference=Reference(files={"solve.sh": TreeFile(f"#!/bin/sh\n{solution}".encode())}),
    )


COINS = [f"test_{number}" for number in range(40)]
FLIPS = "import os\n\n\n" + "".join(
    f"def {name}():\n    assert os.urandom(1)[0] % 2\n\n\n" for name in COINS
)


async def test_each_flaw_is_found_and_good_tasks_are_kept(
    sandbox_target: str, tmp_path: Path
) -> None:
    tasks = [
        GOOD,
        scripted("script", "echo 42 >answer"),
        scripted("beside", "echo 42 >/tmp/answer"),
        named("untold", reference=None),
        named("wrong", reference=Reference(patch=README)),
        judged_by("easy", "def test_it():\n    assert 1\n", "test_it"),
        judged_by(
            "slow", "import time\n\n\ndef test_it():\n    time.sleep(9)\n", "test_it", wall_s=0.4
        ),
        judged_by("coins", FLIPS, *COINS),
        named("no-image", environment=Environment(image="no.such/image:1")),
    ]
    found = await self_test(sandbox_target, tmp_path, tasks)
    flaws = {
        name: [finding.flaw for finding in record.decision.findings]
        for name, record in found.items()
    }
    assert flaws == {
        MADE.task_id: [],
        "script": [],
        "beside": [Flaw.GOLD_UNSOLVED],
        "untold": [Flaw.NO_REFERENCE],
        "wrong": [Flaw.GOLD_UNSOLVED],
        "easy": [Flaw.EMPTY_SOLVED],
        "slow": [Flaw.GOLD_EXCEEDS_LIMITS],
        "coins": [Flaw.GOLD_UNSOLVED, Flaw.FLAKY, Flaw.FLAKY],
        "no-image": [],
    }
    assert {name for name, r in found.items() if r.decision.outcome is Outcome.KEPT} == {
        MADE.task_id,
        "script",
    }
    assert found["no-image"].decision.outcome is Outcome.FAULT
    assert found["no-image"].decision.fault is not None
    assert found["no-image"].decision.fault.cause == "IMAGE"
    flaky = found["coins"].decision.findings[-1]
    assert set(flaky.tests) <= {f"tests/test_other.py::{name}" for name in COINS}
    assert len(flaky.tests) > 5
    assert "empty_diff" in str(found["beside"].decision.findings[0])


async def test_a_sandbox_that_can_not_run_tests_quarantines_nothing(
    sandbox_target: str, tmp_path: Path
) -> None:
    """Once it can, the same file tests the task anew."""
    (record,) = (await self_test(sandbox_target, tmp_path, [GOOD], python="python9")).values()
    assert (record.decision.outcome, record.decision.findings) == (Outcome.FAULT, ())
    assert record.decision.fault is not None
    assert record.decision.fault.cause == "SANDBOX"
    assert "local.site_packages" in record.decision.fault.message
    (record,) = (await self_test(sandbox_target, tmp_path, [GOOD])).values()
    assert record.decision.outcome is Outcome.KEPT
