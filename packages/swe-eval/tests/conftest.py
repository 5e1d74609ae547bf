"""Shared fixtures: sandbox hosts, played and real, and a small task."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from sandbox_client import Command, EnvironmentRef, FileContent, SandboxClient
from sandbox_client.testing.packages import copy_pytest
from service_kit.channel import ChannelConfig, open_channel
from service_kit.errors import FailedPrecondition, NotFound, Reason, ServiceError
from service_kit.server import ServerConfig
from swe_eval.app import assemble
from swe_eval.config import EvalConfig, EvaluationConfig, GeneratedSetConfig, GradingConfig
from swe_eval.grading.host import CommandResult
from swe_eval.grading.run import Grade, Grader
from swe_eval.grading.sandboxes import ServiceHost
from swe_eval.tasks.task import (
    Environment,
    FileTree,
    LogGrader,
    Reference,
    Task,
    TestGrader,
    TestRunner,
    TreeFile,
)
from tailrace.eval.v1 import eval_service_pb2
from tailrace.eval.v1.eval_service_pb2_grpc import EvalServiceStub

if TYPE_CHECKING:
    from tailrace.eval.v1.eval_service_pb2_grpc import EvalServiceAsyncStub

START_S = 60.0

# Their Harbor tasks hold tests of their own.
collect_ignore = ["data"]


def fill(folder: Path, files: FileTree) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path, file in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.content)
        target.chmod(0o755 if file.executable else 0o644)


def git_apply(patch: bytes, cwd: str) -> list[str]:
    command = ["git", "apply", "--whitespace=nowarn"]
    numbers = subprocess.run(
        [*command, "--numstat", "-z"], input=patch, cwd=cwd, capture_output=True
    )
    done = subprocess.run(command, input=patch, cwd=cwd, capture_output=True)
    if done.returncode != 0:
        raise FailedPrecondition(done.stderr.decode(), reason=Reason.PATCH_REJECTED)
    return [entry.split(b"\t")[2].decode() for entry in numbers.stdout.split(b"\0") if entry]


def git_diff(before: str, after: str) -> bytes:
    command = ["git", "diff", "--no-index", "--no-prefix", before, after]
    found = subprocess.run(command, capture_output=True).stdout
    for folder, prefix in ((before, b"a"), (after, b"b")):
        found = found.replace(folder.strip("/").encode(), prefix)
    return found


class FolderHost:
    """Runs commands in a folder of this machine: no isolation, so for tests of our own logic only.

    Each environment's work folder must lie under the folder given here, one sandbox at a time.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.live: dict[str, Environment] = {}
        self.created = 0
        self.calls: list[str] = []
        self.written: dict[str, bytes] = {}
        self.fail: dict[str, ServiceError] = {}
        self.answer: Callable[[Sequence[str]], CommandResult | None] = lambda argv: None

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            raise self.fail[name]

    async def create(self, environment: Environment) -> str:
        self._called("create")
        self.created += 1
        workdir = Path(environment.workdir)
        assert workdir.is_relative_to(self.root)
        shutil.rmtree(workdir, ignore_errors=True)
        fill(workdir, environment.files)
        sandbox_id = uuid.uuid4().hex
        self.live[sandbox_id] = environment
        return sandbox_id

    def put(self, sandbox_id: str, path: str, text: str) -> None:
        """Replaces a file of the work folder, as an agent's diff would."""
        fill(Path(self._environment(sandbox_id).workdir), {path: TreeFile(text.encode())})

    def _environment(self, sandbox_id: str) -> Environment:
        if sandbox_id not in self.live:
            raise NotFound(f"no sandbox {sandbox_id}", reason=Reason.SANDBOX_GONE)
        return self.live[sandbox_id]

    async def apply_patch(self, sandbox_id: str, patch: bytes) -> list[str]:
        self._called("apply_patch")
        return git_apply(patch, self._environment(sandbox_id).workdir)

    async def diff(self, sandbox_id: str) -> bytes:
        self._called("diff")
        environment = self._environment(sandbox_id)
        with tempfile.TemporaryDirectory(dir=self.root) as pristine:
            fill(Path(pristine), environment.files)
            return git_diff(pristine, environment.workdir)

    async def write_files(self, sandbox_id: str, folder: str, files: FileTree) -> None:
        self._called("write_files")
        self._environment(sandbox_id)
        for path, file in files.items():
            self.written[f"{folder}/{path}"] = file.content
        fill(Path(folder), files)

    async def run(
        self,
        sandbox_id: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float,
        max_output_bytes: int,
    ) -> CommandResult:
        self._called("run")
        cwd = self._environment(sandbox_id).workdir
        answer = self.answer(argv)
        if answer is not None:
            return answer
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=cwd,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", **env},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        reading = asyncio.gather(process.stdout.read(), process.stderr.read())
        timed_out = False
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            timed_out = True
            os.killpg(process.pid, signal.SIGKILL)
        status = await process.wait()
        with contextlib.suppress(ProcessLookupError):  # whatever it left behind
            os.killpg(process.pid, signal.SIGKILL)
        out, err = await reading
        return CommandResult(
            exit_code=status if status >= 0 else 128 - status,
            stdout=out[-max_output_bytes:],
            stderr=err[-max_output_bytes:],
            timed_out=timed_out,
        )

    async def destroy(self, sandbox_id: str) -> None:
        self._called("destroy")
        self._environment(sandbox_id)
        del self.live[sandbox_id]


@pytest.fixture
def folder_host(tmp_path: Path) -> Iterator[FolderHost]:
    host = FolderHost(tmp_path)
    yield host
    for path in host.written:
        if path.startswith("/tmp/"):
            shutil.rmtree(Path(path).parent, ignore_errors=True)
    assert host.live == {}, "a sandbox was not destroyed"


@pytest.fixture
def make_shop(tmp_path: Path) -> Callable[..., Task]:
    """Makes the shop task: `add` subtracts; a hidden test of each function."""

    def make(
        *,
        runner: TestRunner = TestRunner.FUNCTIONS,
        hidden: str | None = None,
        wall_s: float = 20.0,
        cpu_s: int = 10,
        reference: Reference | None = None,
        workdir: str | None = None,
        fail_to_pass: tuple[str, ...] = ("tests/test_hidden.py::test_add",),
        pass_to_pass: tuple[str, ...] = ("tests/test_hidden.py::test_double",),
    ) -> Task:
        return Task(
            task_id="shop-1",
            repository="shop",
            kind="operator_change",
            instruction="add(2, 3) returns -1, expected 5",
            environment=Environment(
                files={
                    "shop.py": TreeFile(
                        b"def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return 2 * a\n"
                    ),
                    "test_shop.py": TreeFile(
                        b"from shop import double\n\n\n"
                        b"def test_double():\n    assert double(2) == 4\n"
                    ),
                    "setup.cfg": TreeFile(b"[tool:pytest]\naddopts = -q\n"),
                },
                workdir=workdir or str(tmp_path / "work"),
            ),
            grader=TestGrader(
                runner=runner,
                files={
                    "tests/test_hidden.py": hidden
                    or (
                        "from shop import add, double\n\n\n"
                        "def test_add():\n    assert add(20, 3) == 23\n\n\n"
                        "def test_double():\n    assert double(21) == 42\n"
                    )
                },
                fail_to_pass=fail_to_pass,
                pass_to_pass=pass_to_pass,
                wall_s=wall_s,
                cpu_s=cpu_s,
            ),
            reference=reference,
        )

    return make


@pytest.fixture(scope="session")
def sandbox_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a running sandbox service."""
    if os.geteuid() != 0:
        pytest.skip("sandboxes of the local back-end need root")
    folder = tmp_path_factory.mktemp("sandboxes")
    address_file = folder / "address"
    site_packages = folder / "site-packages"
    copy_pytest(site_packages)
    folder.chmod(0o755)
    settings = [
        "server.bind=127.0.0.1:0",
        f"server.address_file={address_file}",
        f"state_dir={folder / 'state'}",
        f"local.site_packages={site_packages}",
        "local.cgroup_parent=tailrace-eval-tests",
    ]
    log = (folder / "log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "sandbox_client", "serve", *(f"--set={s}" for s in settings)],
        stdout=log,
        stderr=log,
    )
    try:
        deadline = time.monotonic() + START_S
        while not address_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                text = (folder / "log").read_text()
                pytest.fail(f"the sandbox service did not start (status {process.poll()}):\n{text}")
            time.sleep(0.05)
        yield address_file.read_text().strip()
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        log.close()


Start = Callable[..., Awaitable["EvalServiceAsyncStub"]]


@pytest.fixture
async def start_eval(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts an EvalService in this process and gives a client of it over a real channel.

    Keyword arguments replace parts of its configuration.
    """
    async with AsyncExitStack() as stack:

        async def start(**changes: object) -> "EvalServiceAsyncStub":
            settings: dict[str, object] = {
                "server": ServerConfig(bind="127.0.0.1:0"),
                "sandbox": ChannelConfig(target="127.0.0.1:9"),
                "task_sets": [
                    GeneratedSetConfig(name="train", count=50, test_wall_s=5.0),
                    GeneratedSetConfig(name="heldout", split="heldout", count=20),
                ],
                "evaluation": EvaluationConfig(state_dir=tmp_path, heartbeat_s=0.2),
            }
            config = EvalConfig(**{**settings, **changes})  # type: ignore[arg-type]
            server = await stack.enter_async_context(await assemble(config, stack))
            channel = open_channel(
                ChannelConfig(target=server.address, default_timeout_s=60.0),
                contracts=[eval_service_pb2.DESCRIPTOR],
            )
            return EvalServiceStub(await stack.enter_async_context(channel))

        yield start


@pytest.fixture
async def eval_stub(start_eval: Start, sandbox_target: str) -> "EvalServiceAsyncStub":
    """A client of an EvalService that grades in real sandboxes."""
    return await start_eval(sandbox=ChannelConfig(target=sandbox_target))


# -- an agent's work, graded in real sandboxes

SHOP = """\
def add(a, b):
    return a - b


def double(a):
    return 2 * a
"""
SHOP_FIX = b"""\
diff --git a/shop.py b/shop.py
--- a/shop.py
+++ b/shop.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
VISIBLE = "from shop import double\n\n\ndef test_double():\n    assert double(2) == 4\n"
HIDDEN = """\
from shop import add, double


def test_add():
    assert add(20, 3) == 23


def test_add_below_zero():
    assert add(-4, 1) == -3


def test_double():
    assert double(21) == 42
"""
UNITTESTS = """\
import unittest

from shop import add, double


class Shop(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(20, 3), 23)

    def test_double(self):
        self.assertEqual(double(21), 42)
"""
SCRIPT = f"""\
cat >test_logged.py <<'END'
{UNITTESTS}END
echo ">>>>> Start Test Output"
python3 -m unittest -v test_logged
echo ">>>>> End Test Output"
"""
TASK_FILES = {
    "shop.py": SHOP,
    "test_shop.py": VISIBLE,
    "setup.cfg": "[tool:pytest]\naddopts = -q\n",
}


def shop_task(kind: str) -> Task:
    """The task, graded by `functions`, by `pytest` or by a `log`."""
    tests = ("test_add", "test_add_below_zero", "test_double")
    ids = tuple(f"tests/test_hidden.py::{name}" for name in tests)
    grader: TestGrader | LogGrader
    if kind == "log":
        names = tuple(f"{name} (test_logged.Shop.{name})" for name in ("test_add", "test_double"))
        grader = LogGrader(
            script=SCRIPT,
            parser="unittest",
            fail_to_pass=names[:1],
            pass_to_pass=names[1:],
            protected=frozenset({"test_logged.py"}),
            wall_s=3.0,
        )
    else:
        grader = TestGrader(
            runner=TestRunner(kind),
            files={"tests/test_hidden.py": HIDDEN},
            fail_to_pass=ids[:2],
            pass_to_pass=ids[2:],
            wall_s=3.0 if kind == "functions" else 10.0,
            cpu_s=1 if kind == "functions" else 5,
        )
    return Task(
        task_id=f"shop-{kind}",
        repository="shop",
        instruction="add(2, 3) returns -1, expected 5",
        environment=Environment(
            files={path: TreeFile(text.encode()) for path, text in TASK_FILES.items()}
        ),
        grader=grader,
        reference=Reference(patch=SHOP_FIX),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def submit(sandbox_target: str) -> AsyncIterator[Callable[..., Awaitable[Grade]]]:
    """Does an agent's work in a sandbox of its own, and has the diff of it graded.

    Takes the kind of grading, the files that the agent writes, and a command that it then runs.
    """

    async def submit(kind: str, files: Mapping[str, str], command: str = "") -> Grade:
        task = shop_task(kind)
        tree = task.environment.tree
        await client.put_environment(tree)
        reference = EnvironmentRef(tree_digest=tree.digest, workdir=task.environment.workdir)
        async with await client.create(reference) as sandbox:
            if files:
                await sandbox.write_files(
                    [FileContent(path, text.encode()) for path, text in files.items()]
                )
            if command:
                done = await sandbox.run(Command(shell=command, timeout_s=20.0))
                assert done.exit_code == 0, done
            diff = await sandbox.diff()
        return await grader.grade(task, diff, attempt="cheating")

    config = ChannelConfig(target=sandbox_target)
    async with SandboxClient(config, owner="cheating", call_timeout_s=30.0) as client:
        grader = Grader(ServiceHost(client, start_timeout_s=30.0), GradingConfig())
        yield submit
