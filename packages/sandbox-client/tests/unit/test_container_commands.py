# ruff: noqa: ASYNC220, ASYNC240 -- this host stands in for a container
"""How commands of a container are started, followed and ended, with this host in its place."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from sandbox_client.backends.base import ExecHooks
from sandbox_client.backends.docker import running
from sandbox_client.backends.docker.cgroups import ContainerCgroups
from sandbox_client.backends.docker.engine import ExecState, NotThereError
from sandbox_client.backends.docker.running import (
    PIPES_FOLDER,
    ContainerSettings,
    DockerCommands,
)
from sandbox_client.backends.local.cgroups import CgroupLimits, SandboxCgroup
from sandbox_client.backends.running import CommandRunner
from sandbox_client.errors import SandboxGone, SandboxUnavailable, TooLarge, WrongRequest
from sandbox_client.types import Command, ExecResult


class HostEngine:
    """A daemon whose containers are this host."""

    def __init__(self, pipes: Path) -> None:
        self._pipes = pipes
        self.started: list[subprocess.Popen[bytes]] = []
        self.failure: Exception | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def exec_start(
        self, container: str, argv: Sequence[str], environ: Mapping[str, str], *, user: str
    ) -> str:
        assert (container, user) == ("c1", f"{os.getuid()}:{os.getgid()}")
        if self.failure is not None:
            raise self.failure
        here = [word.replace(PIPES_FOLDER, str(self._pipes)) for word in argv]
        self.started.append(subprocess.Popen(here, env=dict(environ), start_new_session=True))
        await self.may_answer.wait()
        return str(len(self.started) - 1)

    async def exec_state(self, command: str) -> ExecState:
        process = self.started[int(command)]
        # As the daemon has it: a signal is a code above 128.
        code = process.poll()
        told = 128 - code if code is not None and code < 0 else code
        return ExecState(process.pid, code is None, told)


class Container:
    """One container of it, with folders for cgroups."""

    def __init__(self, folder: Path) -> None:
        self.pipes = folder / "pipes"
        self.freezer, self.pids = folder / "freezer", folder / "pids"
        for path in (self.pipes, self.freezer, self.pids):
            path.mkdir()
        self.room(100)
        self.engine = HostEngine(self.pipes)
        self.ending = False
        self.commands = DockerCommands(
            self.engine,  # type: ignore[arg-type]
            ContainerSettings(
                "c1", str(folder), {"PATH": os.environ["PATH"]}, os.getuid(), os.getgid(),
                self.pipes, 20.0,
            ),
            ContainerCgroups(
                1, self.freezer, None, SandboxCgroup(1, CgroupLimits(0, 0), {}), self.pids
            ),
            lambda: SandboxGone(f"gone: {self.commands.lost}"),
            self.look_after,
        )  # fmt: skip
        self.runner = CommandRunner(self.commands, kill_grace_s=10.0)

    def room(self, left: int) -> None:
        (self.pids / "pids.max").write_text("100\n")
        (self.pids / "pids.current").write_text(f"{100 - left}\n")

    def look_after(self) -> None:
        if self.ending:
            self.commands.lose("its container ended")

    async def run(self, shell: str, hooks: ExecHooks | None = None, **options: Any) -> ExecResult:
        asked = {"timeout_s": 20.0, "max_output_bytes": 1000, **options}
        return await self.runner.run(Command(shell=shell, **asked), hooks or ExecHooks())


@pytest.fixture
async def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Container]:
    def told_by_its_parent(pid_fd: int) -> int | None:
        raise NotImplementedError

    # These processes are this one's children, which nobody else collects.
    monkeypatch.setattr(running, "exit_status", told_by_its_parent)
    made = Container(tmp_path)
    yield made
    made.runner.close()
    for process in made.engine.started:
        process.kill()
        process.wait()


async def until(check: Callable[[], object]) -> None:
    for _ in range(1000):
        if check():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that")


async def test_a_command_gets_its_pipes_folder_and_variables(
    container: Container, tmp_path: Path
) -> None:
    result = await container.run("pwd; echo $A >&2; env | grep -c OLDPWD; exit 3", env={"A": "b"})
    assert result.stdout.splitlines() == [str(tmp_path), "0"]
    assert (result.stderr, result.exit_code, result.signal) == ("b\n", 3, 0)
    assert list(container.pipes.iterdir()) == []  # nobody can open them any more


async def test_it_waits_until_it_is_in_its_cgroup(container: Container) -> None:
    container.engine.may_answer.clear()
    call = asyncio.create_task(container.run("echo ran > ran; cat ran"))
    await until(lambda: container.engine.started)
    await asyncio.sleep(0.2)
    assert not Path(container.pipes.parent, "ran").exists()
    container.engine.may_answer.set()
    assert (await call).stdout == "ran\n"


async def test_its_pipes_are_open_to_it_in_one_direction_only(container: Container) -> None:
    container.engine.may_answer.clear()
    call = asyncio.create_task(container.run("true"))
    await until(lambda: len(list(container.pipes.iterdir())) == 3)
    modes = sorted(oct(path.stat().st_mode & 0o777) for path in container.pipes.iterdir())
    assert modes == ["0o200", "0o200", "0o400"]
    container.engine.may_answer.set()
    await call


async def test_input_is_what_the_caller_gives(container: Container) -> None:
    async def words() -> Any:
        yield b"one "
        yield b"two"

    result = await container.run("cat", ExecHooks(stdin=words()))
    assert result.stdout == "one two"
    assert (await container.run("cat")).stdout == ""


async def test_signals_and_codes_come_through_the_daemon(container: Container) -> None:
    killed = await container.run("kill -SEGV $$; echo no")
    assert (killed.signal, killed.exit_code) == (11, 139)
    high = await container.run("exit 255")
    assert (high.signal, high.exit_code) == (0, 255)


async def test_an_overdue_command_is_killed(container: Container) -> None:
    call = asyncio.create_task(container.run("echo so far; exec sleep 60", timeout_s=0.3))
    await until(lambda: list(container.freezer.iterdir()))
    result = await call
    assert (result.timed_out, result.stdout, result.signal) == (True, "so far\n", signal.SIGKILL)


async def test_a_caller_that_leaves_while_it_starts_leaves_nothing(container: Container) -> None:
    container.engine.may_answer.clear()
    call = asyncio.create_task(container.run("touch ran; sleep 60"))
    await until(lambda: container.engine.started)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    container.engine.may_answer.set()
    (process,) = container.engine.started
    await until(lambda: process.poll() is not None)
    assert not Path(container.pipes.parent, "ran").exists()
    assert list(container.pipes.iterdir()) == []


async def test_a_daemon_that_fails_is_the_machines_fault(container: Container) -> None:
    container.engine.failure = SandboxUnavailable("no memory on this host")
    with pytest.raises(SandboxUnavailable, match="no memory"):
        await container.run("true")
    container.engine.failure = NotThereError("no such container")
    with pytest.raises(SandboxUnavailable, match="no such container"):
        await container.run("true")
    assert list(container.freezer.iterdir()) == []
    assert list(container.pipes.iterdir()) == []


async def test_a_container_without_room_is_the_commands_fault(container: Container) -> None:
    container.engine.failure = SandboxUnavailable("exec failed: resource temporarily unavailable")
    container.room(0)
    result = await container.run("echo room")
    assert (result.exit_code, result.stdout) == (126, "")
    assert result.stderr == "sh: cannot start: the sandbox's pids limit is used up\n"
    merged = await container.run("echo room", merge_stderr=True)
    assert "pids limit" in merged.stdout


async def test_a_kill_that_takes_the_container_too_is_no_result(container: Container) -> None:
    call = asyncio.create_task(container.run("exec sleep 60"))
    await until(lambda: container.commands._running)
    await asyncio.sleep(0.2)
    container.ending = True
    container.engine.started[0].kill()
    with pytest.raises(SandboxGone, match="container ended"):
        await call
    with pytest.raises(SandboxGone):
        await container.run("true")


async def test_a_command_that_kills_itself_has_that_as_its_result(container: Container) -> None:
    result = await container.run("kill -KILL $$")
    assert (result.signal, result.timed_out) == (9, False)


async def test_losing_the_sandbox_reaches_all_who_wait(container: Container) -> None:
    calls = [asyncio.create_task(container.run("exec sleep 60")) for _ in range(2)]
    await until(lambda: len(container.commands._running) == 2)
    container.commands.lose("it was destroyed")
    for call in calls:
        with pytest.raises(SandboxGone, match="destroyed"):
            await call


async def test_a_command_that_starts_while_the_sandbox_is_lost_has_no_result(
    container: Container,
) -> None:
    container.engine.may_answer.clear()
    call = asyncio.create_task(container.run("sleep 60"))
    await until(lambda: container.engine.started)
    container.commands.lose("it was destroyed")
    container.engine.may_answer.set()
    with pytest.raises(SandboxGone, match="it was destroyed"):
        await call


async def test_what_cannot_be_passed_on_is_refused(container: Container) -> None:
    with pytest.raises(WrongRequest, match="leaves"):
        await container.run("true", cwd="../..")
    with pytest.raises(TooLarge, match="too long"):
        await container.run("true", env={"BIG": "x" * 200_000})
    many = {f"V{n}": "x" * 100_000 for n in range(12)}
    with pytest.raises(TooLarge, match="too long"):
        await container.run("true", env=many)
    assert container.engine.started == []


async def test_a_program_gets_its_arguments_as_they_are(container: Container) -> None:
    words = ("-n", "a b", "$x", "*", "")
    command = Command(
        argv=(sys.executable, "-c", "import sys; print(sys.argv[1:])", *words),
        timeout_s=20.0,
        max_output_bytes=1000,
    )
    result = await container.runner.run(command, ExecHooks())
    assert result.stdout == f"{list(words)}\n"
