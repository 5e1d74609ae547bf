"""Tasks whose environment is an image, graded in containers of a dockerd: faults, git's history."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sandbox_client import SandboxClient
from sandbox_client.testing.dockerd import Dockerd, dockerd_missing, running_dockerd
from sandbox_client.testing.registry import Registry
from sandbox_client.testing.service import RunningService
from service_kit.channel import ChannelConfig
from service_kit.errors import ServiceError
from swe_eval.config import GradingConfig
from swe_eval.core.selftest import Outcome
from swe_eval.core.verdict import Verdict
from swe_eval.generate import make_task
from swe_eval.grading.run import Grader
from swe_eval.grading.sandboxes import ServiceHost
from swe_eval.selftest import SelfTest
from swe_eval.tasks.generated import from_generated
from swe_eval.tasks.selftest_file import SelfTestFile
from swe_eval.tasks.task import Environment, Task

pytestmark = pytest.mark.docker

PROGRAMS = ("sh", "cat", "env", "find", "git", "head", "rm")
MADE = make_task("train", 4)
GOLD = MADE.gold_patch.encode()
FILES = {f"testbed/{path}": text for path, text in MADE.files.items()}
LOOK = ["/bin/sh", "-c", "git -c safe.directory='*' log --all -p"]

StartService = Callable[..., str]


@pytest.fixture(scope="module")
def dockerd() -> Iterator[Dockerd]:
    missing = dockerd_missing()
    if missing:
        pytest.skip(missing)
    with running_dockerd() as running:
        yield running


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    made = Registry()
    yield made
    made.close()


@pytest.fixture
def start_service(dockerd: Dockerd, tmp_path: Path) -> Iterator[StartService]:
    """Starts services with further settings; gives their addresses."""
    with contextlib.ExitStack() as running:

        def start(*settings: str) -> str:
            folder = Path(tempfile.mkdtemp(dir=tmp_path))
            service = RunningService(
                folder,
                "backend=docker",
                f"docker.socket={dockerd.socket}",
                "docker.disk_watermark=1",
                *settings,
            )
            service.start()
            running.callback(service.stop)
            return service.target

        yield start


@contextlib.asynccontextmanager
async def hosted(target: str, start_timeout_s: float = 60.0) -> AsyncIterator[ServiceHost]:
    channel = ChannelConfig(target=target)
    async with SandboxClient(channel, owner="images", call_timeout_s=60.0) as client:
        yield ServiceHost(client, start_timeout_s=start_timeout_s)


def task_in(image: str) -> Task:
    task = from_generated(MADE, wall_s=30.0, cpu_s=10, command_timeout_s=0)
    return replace(task, environment=Environment(image=image, workdir="/testbed"))


async def fault_of(host: ServiceHost, image: str) -> tuple[str, str]:
    """Stage and cause."""
    with pytest.raises(ServiceError) as caught:
        await Grader(host, GradingConfig()).grade(task_in(image), GOLD, attempt="a")
    return caught.value.metadata["grading_stage"], caught.value.metadata["fault_cause"]


async def test_an_image_that_no_registry_has_is_a_fault_of_the_image(
    start_service: StartService, registry: Registry
) -> None:
    async with hosted(start_service()) as host:
        found = await fault_of(host, f"{registry.host}/missing:latest")
    assert found == ("START_SANDBOX", "IMAGE")


async def test_a_used_up_pull_budget_is_a_fault_of_the_quota_and_the_diff_is_graded_later(
    start_service: StartService, registry: Registry
) -> None:
    first, second = (
        registry.add(name, FILES, programs=PROGRAMS, python=True) for name in ("one", "two")
    )
    target = start_service("docker.image_pulls_per_hour=1")
    async with hosted(target) as host:
        grader = Grader(host, GradingConfig())
        grade = await grader.grade(task_in(first), GOLD, attempt="a")
        assert grade.verdict is Verdict.SOLVED, grade
    async with hosted(target, start_timeout_s=1.0) as host:
        assert await fault_of(host, second) == ("START_SANDBOX", "QUOTA")
    assert registry.pulls["two"] == 0
    async with hosted(start_service("docker.image_pulls_per_hour=9")) as host:
        grade = await Grader(host, GradingConfig()).grade(task_in(second), GOLD, attempt="a")
        assert grade.verdict is Verdict.SOLVED, grade


async def test_a_registry_that_refuses_is_a_fault_of_the_quota(
    start_service: StartService, registry: Registry
) -> None:
    image = registry.add("refused", FILES)
    registry.too_often = True
    try:
        async with hosted(start_service(), start_timeout_s=20.0) as host:
            assert await fault_of(host, image) == ("START_SANDBOX", "QUOTA")
    finally:
        registry.too_often = False


def with_history(folder: Path) -> dict[str, str | bytes]:
    """The files of the image, in a repository whose history holds the repair."""
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@localhost"]
    subprocess.run([*git, "init", "-q"], check=True)
    broken = MADE.files[MADE.module]
    for text in ("# the-repair\n", broken):
        for path, content in MADE.files.items():
            (folder / path).write_text(text if path == MADE.module else content)
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-q", "-m", "c"], check=True)
    return {
        f"testbed/{path.relative_to(folder)}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "hooks" not in path.parts
    }


async def test_the_history_of_roots_repository_in_an_image_is_gone_and_tasks_pass_their_self_test(
    start_service: StartService, registry: Registry, tmp_path: Path
) -> None:
    """The image's files are root's, and commands run as another user."""
    folder = tmp_path / "repository"
    folder.mkdir()
    image = registry.add("history", with_history(folder), programs=PROGRAMS, python=True)
    environment = Environment(image=image, workdir="/testbed", forget_history=True)
    async with hosted(start_service()) as host:
        for forget in (False, True):
            sandbox = await host.create(replace(environment, forget_history=forget))
            told = await host.run(sandbox, LOOK, env={}, timeout_s=30, max_output_bytes=99_999)
            await host.destroy(sandbox)
            assert (b"the-repair" in told.stdout) != forget, told
            assert MADE.function.encode() in told.stdout, told
        file = SelfTestFile(tmp_path / "selftest.jsonl")
        task = replace(task_in(image), environment=environment)
        (record,) = [r async for r in SelfTest(Grader(host, GradingConfig()), file).run([task])]
        file.close()
    assert record.decision.outcome is Outcome.KEPT, record
