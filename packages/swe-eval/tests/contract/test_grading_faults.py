"""What goes wrong while a diff is graded in real sandboxes, and what the diff itself uses up."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sandbox_client import SandboxClient
from service_kit.channel import ChannelConfig
from service_kit.errors import FailedPrecondition, ServiceError
from swe_eval.config import GradingConfig
from swe_eval.core.verdict import Verdict
from swe_eval.generate import make_task
from swe_eval.generate.task import unified_patch
from swe_eval.grading.run import Grader
from swe_eval.grading.sandboxes import ServiceHost
from swe_eval.tasks.generated import from_generated
from swe_eval.tasks.task import Environment, Task, TreeFile

if TYPE_CHECKING:
    from swe_eval.grading.host import SandboxHost

MADE = make_task("train", 4)
GOLD = MADE.gold_patch.encode()


def task() -> Task:
    return from_generated(MADE, wall_s=3.0, cpu_s=2, command_timeout_s=0)


def adding(code: str) -> bytes:
    """The reference solution with this code before it in the repaired module."""
    hunk = MADE.gold_patch.split("@@", 2)[2].split("\n")[1:-1]
    old = "\n".join(line[1:] for line in hunk if line[:1] in (" ", "-"))
    new = "\n".join(line[1:] for line in hunk if line[:1] in (" ", "+"))
    broken = MADE.files[MADE.module]
    assert old in broken
    return unified_patch(MADE.module, broken, f"{code}\n" + broken.replace(old, new, 1)).encode()


@asynccontextmanager
async def hosted(target: str) -> AsyncIterator[ServiceHost]:
    config = ChannelConfig(target=target)
    async with SandboxClient(config, owner="faults", call_timeout_s=10.0) as client:
        yield ServiceHost(client, start_timeout_s=10.0)


class Wire:
    """A connection to a service, which can be cut."""

    def __init__(self, target: str) -> None:
        self.host, _, port = target.rpartition(":")
        self.port = int(port)
        self.writers: list[asyncio.StreamWriter] = []
        self.server: asyncio.Server | None = None

    async def open(self) -> str:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self.host, self.port)
        self.writers += [writer, far_writer]
        await asyncio.gather(self.copy(reader, far_writer), self.copy(far_reader, writer))

    async def copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.close()

    def cut(self) -> None:
        assert self.server is not None
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()


# Which call fails, of how many, when what is graded; and the stage that it belongs to.
MOMENTS = [
    ("create", 1, "gold", "START_SANDBOX"),
    ("apply_patch", 1, "gold", "APPLY_DIFF"),
    ("write_files", 1, "gold", "RUN_TESTS"),
    ("run", 1, "gold", "RUN_TESTS"),
    ("create", 2, "gold", "START_SANDBOX"),
    ("apply_patch", 2, "gold", "APPLY_DIFF"),
    ("run", 2, "gold", "RUN_CONTROL"),
    ("apply_patch", 2, "aborts", "RUN_REFERENCE"),
    ("run", 2, "aborts", "RUN_REFERENCE"),
]
at_each_moment = pytest.mark.parametrize(("call", "nth", "work", "stage"), MOMENTS)


def diff_and_verdict(work: str) -> tuple[bytes, Verdict]:
    """`aborts`: the tests come to no end, and a run of the reference has to tell why."""
    if work == "gold":
        return GOLD, Verdict.SOLVED
    return adding("import os\nos._exit(3)"), Verdict.UNSOLVED


@at_each_moment
async def test_a_cut_network_is_a_fault_with_its_stage_and_the_diff_is_graded_again(
    sandbox_target: str, call: str, nth: int, work: str, stage: str
) -> None:
    diff, verdict = diff_and_verdict(work)
    wire = Wire(sandbox_target)
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(hosted(await wire.open()))
        working = getattr(host, call)
        calls = 0

        async def cut(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == nth:
                wire.cut()
            return await working(*args, **kwargs)

        setattr(host, call, cut)
        with pytest.raises(ServiceError) as caught:
            await Grader(host, GradingConfig()).grade(task(), diff, attempt="a")
        assert caught.value.metadata["fault_cause"] in {"NETWORK", "DEADLINE"}
        assert caught.value.metadata["grading_stage"] == stage
        whole = await stack.enter_async_context(hosted(sandbox_target))
        again = await Grader(whole, GradingConfig()).grade(task(), diff, attempt="a")
        assert again.verdict is verdict


with_a_sandbox = pytest.mark.parametrize(
    ("call", "nth", "work", "stage"), [moment for moment in MOMENTS if moment[0] != "create"]
)


@with_a_sandbox
async def test_a_sandbox_that_dies_is_replaced_without_the_agent(
    sandbox_target: str, call: str, nth: int, work: str, stage: str
) -> None:
    diff, verdict = diff_and_verdict(work)
    async with hosted(sandbox_target) as host:
        lose(host, call, {nth})
        found = await Grader(host, GradingConfig()).grade(task(), diff, attempt="a")
    assert found.verdict is verdict, found


@with_a_sandbox
async def test_sandboxes_that_die_again_and_again_are_a_fault_and_no_verdict(
    sandbox_target: str, call: str, nth: int, work: str, stage: str
) -> None:
    diff, verdict = diff_and_verdict(work)
    async with hosted(sandbox_target) as host:
        whole = getattr(host, call)
        # A grading that begins anew comes to the same moment after as many calls.
        lose(host, call, {nth, 2 * nth, 3 * nth})
        grader = Grader(host, GradingConfig(retries=2))
        with pytest.raises(ServiceError) as caught:
            await grader.grade(task(), diff, attempt="a")
        assert caught.value.metadata["fault_cause"] == "SANDBOX"
        assert caught.value.metadata["grading_stage"] == stage
        setattr(host, call, whole)
        assert (await grader.grade(task(), diff, attempt="a")).verdict is verdict


@pytest.mark.parametrize("solved", [True, False], ids=["gold", "wrong"])
async def test_a_sandbox_that_dies_in_the_midst_of_the_tests_is_replaced(
    sandbox_target: str, solved: bool
) -> None:
    code = "import time\ntime.sleep(0.5)" + ("" if solved else "\n1 / 0")
    async with hosted(sandbox_target) as host:
        lose(host, "run", {1}, after_s=0.2)
        found = await Grader(host, GradingConfig()).grade(task(), adding(code), attempt="a")
    assert (found.verdict is Verdict.SOLVED) == solved, found
    assert found.reason in {"", "tests_failed"}


def lose(host: SandboxHost, call: str, numbers: set[int], *, after_s: float = 0.0) -> None:
    """Ends sandboxes right before the calls of these numbers, or in the midst of them."""
    working: Callable[..., Any] = getattr(host, call)
    sandboxes: dict[str, Any] = host._sandboxes  # type: ignore[attr-defined]
    calls = 0

    async def lossy(sandbox_id: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls not in numbers:
            return await working(sandbox_id, *args, **kwargs)
        if not after_s:
            await sandboxes[sandbox_id].destroy()
        called = asyncio.create_task(working(sandbox_id, *args, **kwargs))
        await asyncio.sleep(after_s)
        await sandboxes[sandbox_id].destroy()
        return await called

    setattr(host, call, lossy)


async def test_a_task_without_an_image_to_be_had_is_a_fault_of_the_image(
    sandbox_target: str,
) -> None:
    wants = replace(task(), environment=Environment(image="no.such/image:1"))
    async with hosted(sandbox_target) as host:
        with pytest.raises(FailedPrecondition) as caught:
            await Grader(host, GradingConfig()).grade(wants, GOLD, attempt="a")
    assert caught.value.metadata["fault_cause"] == "IMAGE"
    assert caught.value.metadata["grading_stage"] == "START_SANDBOX"


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time\ntime.sleep(60)",
        "hoard = []\nwhile True: hoard.append(bytearray(1 << 24))",
        "n = 0\nwhile True:\n    open(f'/tmp/full{n}', 'wb').write(bytes(1 << 24))\n    n += 1",
        "n = 0\nwhile True:\n    open(f'full{n}', 'wb').write(bytes(1 << 24))\n    n += 1",
    ],
    ids=["processor time", "wall time", "memory", "disk", "disk of the work folder"],
)
async def test_a_patch_that_uses_up_what_the_reference_does_not_is_unsolved(
    sandbox_target: str, code: str
) -> None:
    async with hosted(sandbox_target) as host:
        grader = Grader(host, GradingConfig())
        found = await grader.grade(task(), adding(code), attempt="a")
        frugal = await grader.grade(task(), adding("hoard = bytearray(1 << 24)"), attempt="a")
    assert frugal.verdict is Verdict.SOLVED, frugal
    assert found.verdict is Verdict.UNSOLVED, found
    assert found.reason not in {"patch_rejected", "diff_malformed"}, found


async def test_a_binary_file_beside_a_repair_is_applied_with_it(sandbox_target: str) -> None:
    # `git diff --binary` of a new file of the bytes 0 to 3.
    logo = (
        b"diff --git a/logo.png b/logo.png\nnew file mode 100644\n"
        b"index 0000000000000000000000000000000000000000.."
        b"eaf36c1daccfdf325514461cd1a2ffbc139b5464\nGIT binary patch\nliteral 4\n"
        b"LcmZQzWMT#Y01f~L\n\nliteral 0\nHcmV?d00001\n\n"
    )
    async with hosted(sandbox_target) as host:
        found = await Grader(host, GradingConfig()).grade(task(), GOLD + logo, attempt="a")
    assert found.verdict is Verdict.SOLVED, found


def history_of(folder: Path) -> dict[str, TreeFile]:
    """The files of a repository that holds a repair and then takes it back."""
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@localhost"]
    subprocess.run([*git, "init", "-q"], check=True)
    for text in ("the-repair\n", "broken\n"):
        (folder / "code").write_text(text)
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-q", "-m", "c"], check=True)
    return {
        str(path.relative_to(folder)): TreeFile(path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file() and "hooks" not in path.parts
    }


async def test_git_history_that_holds_the_repair_is_gone_where_tests_run(
    sandbox_target: str, tmp_path: Path
) -> None:
    files = history_of(tmp_path)
    look = ["/bin/sh", "-c", "git -c safe.directory='*' log --all -p"]
    for forget in (False, True):
        environment = Environment(files=files, forget_history=forget)
        async with hosted(sandbox_target) as host:
            sandbox = await host.create(environment)
            told = await host.run(sandbox, look, env={}, timeout_s=10, max_output_bytes=9999)
            await host.destroy(sandbox)
        assert (b"the-repair" in told.stdout) != forget, told
        assert b"broken" in told.stdout
