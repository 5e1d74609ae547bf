"""Grader, sandbox service and its disk fail in the midst of gradings: faults, and graded again."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rollout_engine.core.retry import Backoff
from rollout_engine.evaluation import EvalPeer
from rollout_engine.patience import Patience
from rollout_engine.types import AttemptId, GroupKey
from sandbox_client import SandboxClient
from sandbox_client.testing.service import RunningService
from service_kit.channel import ChannelConfig, open_channel
from service_kit.errors import ServiceError
from swe_eval.config import GradingConfig
from swe_eval.core.verdict import GradeReason, Verdict
from swe_eval.generate import make_task
from swe_eval.generate.task import unified_patch
from swe_eval.grading.run import Grader
from swe_eval.grading.sandboxes import ServiceHost
from swe_eval.tasks.generated import from_generated
from swe_eval.tasks.task import Task, TestGrader, TreeFile
from tailrace_cli.stack.health import free_ports

from integration_tests.faults.test_full_disk import fill
from integration_tests.harness import needs_root, small_disk, until

pytestmark = needs_root

MIB = 1 << 20
MADE = make_task("train", 4)
GOLD = MADE.gold_patch.encode()
TASK = from_generated(MADE, wall_s=20.0, cpu_s=2, command_timeout_s=0)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    running = RunningService(tmp_path, "sandbox.disk_bytes=4194304")
    running.start()
    yield running
    if running.running:
        running.stop()


@contextlib.asynccontextmanager
async def grading(target: str, **settings: object) -> AsyncIterator[Grader]:
    config = GradingConfig(**settings)  # type: ignore[arg-type]
    channel = ChannelConfig(target=target)
    async with SandboxClient(channel, owner="outages", call_timeout_s=10.0) as client:
        yield Grader(ServiceHost(client, start_timeout_s=10.0), config)


async def fault_of(grader: Grader, task: Task, diff: bytes) -> tuple[str, str]:
    """Stage and cause."""
    with pytest.raises(ServiceError) as caught:
        await grader.grade(task, diff, attempt="a")
    return caught.value.metadata["grading_stage"], caught.value.metadata["fault_cause"]


def with_file(size: int, diff: bytes = GOLD) -> bytes:
    """The diff, and a new file of about so many bytes in it."""
    lines = [f"{number:063d}\n" for number in range(size // 64)]
    header = "diff --git a/big b/big\nnew file mode 100644\n--- /dev/null\n+++ b/big\n"
    hunk = f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}" for line in lines)
    return diff + (header + hunk).encode()


def with_hidden(size: int) -> Task:
    """The task with about so many bytes of hidden tests."""
    assert isinstance(TASK.grader, TestGrader)
    files = {path: text + "# padding\n" * (size // 10) for path, text in TASK.grader.files.items()}
    return replace(TASK, grader=replace(TASK.grader, files=files))


def slow(seconds: float) -> bytes:
    """The reference solution in a module that takes its time."""
    broken = MADE.files[MADE.module]
    hunk = MADE.gold_patch.split("@@", 2)[2].split("\n")[1:-1]
    old, new = (
        "\n".join(line[1:] for line in hunk if line[:1] in (" ", sign)) for sign in ("-", "+")
    )
    code = f"import time\ntime.sleep({seconds})\n" + broken.replace(old, new, 1)
    return unified_patch(MADE.module, broken, code).encode()


# -- the disk of the host


async def test_a_full_disk_is_a_fault_where_a_new_environment_needs_it(tmp_path: Path) -> None:
    with small_disk(tmp_path / "state", 24 * MIB):
        running = RunningService(tmp_path)
        running.start()
        try:
            await gradings_on_a_full_disk(running.target, tmp_path / "state" / "ballast")
        finally:
            running.stop()


async def gradings_on_a_full_disk(target: str, ballast: Path) -> None:
    files = {**TASK.environment.files, "new": TreeFile(bytes(MIB))}
    unknown = replace(TASK, environment=replace(TASK.environment, files=files))
    async with grading(target) as grader:
        assert (await grader.grade(TASK, GOLD, attempt="a")).verdict is Verdict.SOLVED
        fill(ballast)
        assert await fault_of(grader, unknown, GOLD) == ("START_SANDBOX", "DISK")
        # Nothing else of a grading needs it: sandboxes, diffs and tests are in memory.
        known = await grader.grade(with_hidden(2 * MIB), with_file(MIB // 2), attempt="a")
        assert known.verdict is Verdict.SOLVED, known
        await asyncio.to_thread(ballast.unlink)
        assert (await grader.grade(unknown, GOLD, attempt="a")).verdict is Verdict.SOLVED


async def test_a_diff_that_fills_the_sandboxs_own_disk_is_unsolved_if_the_reference_fits(
    service: RunningService,
) -> None:
    """It must not escape into a fault by leaving the tests no room."""
    task = with_hidden(512 * 1024)
    async with grading(service.target, max_diff_bytes=8 * MIB) as grader:
        assert (await grader.grade(task, with_file(MIB), attempt="a")).verdict is Verdict.SOLVED
        found = await grader.grade(task, with_file(4 * MIB - 256 * 1024), attempt="a")
        assert (found.verdict, found.reason) == (Verdict.UNSOLVED, GradeReason.OUT_OF_DISK)
        # Where the reference has no room either, it is the task that is broken.
        broken = replace(with_hidden(5 * MIB), task_id="broken")
        assert await fault_of_task(grader, broken) == "TASK"


async def fault_of_task(grader: Grader, task: Task) -> str:
    with pytest.raises(ServiceError) as caught:
        await grader.grade(task, GOLD, attempt="a")
    return caught.value.metadata["fault_cause"]


# -- the sandbox service


async def test_a_sandbox_service_that_is_killed_while_testing_is_a_fault(
    service: RunningService,
) -> None:
    diff = slow(1.0)
    async with grading(service.target) as grader:
        under_way = asyncio.create_task(fault_of(grader, TASK, diff))
        await until(lambda: grader.limiter.in_use == 1, "a grading")
        await asyncio.sleep(0.5)
        service.kill()
        stage, cause = await under_way
    assert stage in {"RUN_TESTS", "START_SANDBOX"}, "the sandbox is lost, and none can be made"
    assert cause in {"NETWORK", "SANDBOX", "DEADLINE"}
    service.start()
    async with grading(service.target) as grader:
        assert (await grader.grade(TASK, diff, attempt="a")).verdict is Verdict.SOLVED


# -- the grader


class EvalService:
    """`python -m swe_eval serve` on a port that it keeps."""

    def __init__(self, folder: Path, sandbox: str) -> None:
        self.target = f"127.0.0.1:{free_ports(1)[0]}"
        self.log = folder / "eval.log"
        settings = (
            f"server.bind={self.target}",
            f"sandbox.target={sandbox}",
            f"evaluation.state_dir={folder / 'eval'}",
            'task_sets=[{kind="generated", name="train", count=5}]',
        )
        self.command = [
            sys.executable,
            "-m",
            "swe_eval",
            "serve",
            *(f"--set={s}" for s in settings),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


async def test_a_grader_that_is_killed_is_sent_the_diff_again_and_the_agent_is_not_asked(
    service: RunningService, tmp_path: Path
) -> None:
    evaluator = EvalService(tmp_path, service.target)
    evaluator.start()
    try:
        channel = open_channel(ChannelConfig(target=evaluator.target, default_timeout_s=60))
        async with channel, service.client() as sandboxes:
            # The engine's own way to a grader: it has the diff and no sandbox any more.
            peer = EvalPeer(
                channel,
                patience=Patience(60.0, Backoff(0.05, 2.0, 0.5)),
                task_timeout_s=30.0,
                grade_timeout_s=60.0,
            )
            attempt = AttemptId(GroupKey("g", 1), 0, 1)
            grade = asyncio.create_task(peer.grade(MADE.task_id, attempt, slow(1.0)))
            await until_one_runs(sandboxes)
            evaluator.kill()
            assert not grade.done()
            evaluator.start()
            assert (await asyncio.wait_for(grade, 60)).solved
    finally:
        evaluator.kill()


async def until_one_runs(client: SandboxClient) -> None:
    """Waits for a grading sandbox in which a command runs."""
    deadline = time.monotonic() + 60
    while not any(info.running_commands for info in await client.list()):
        assert time.monotonic() < deadline, "no grading has begun"
        await asyncio.sleep(0.05)
