"""Commands of one container.

The daemon starts a shell in the container that is attached to nothing. It opens three named pipes,
which the service reads and writes, and waits at the last of them until the service, having put it
into a cgroup of its own, opens the other end; then it becomes the command. So output needs no
connection to the daemon (which would hold a command's end back for as long as a background process
has the output open), a pipe is filled and drained as a local command's is, and nothing that the
command forks escapes its cgroup.
"""

import asyncio
import contextlib
import errno
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sandbox_client.backends.docker.cgroups import CommandCgroup, ContainerCgroups
from sandbox_client.backends.docker.engine import Engine, ExecState, NotThereError
from sandbox_client.backends.docker.processes import exit_status
from sandbox_client.backends.pipes import OutputPipe
from sandbox_client.backends.running import Ended, Started
from sandbox_client.core.commands import direct_argv
from sandbox_client.core.paths import PathRefusedError, normalize
from sandbox_client.errors import SandboxGone, SandboxUnavailable, TooLarge, WrongRequest
from sandbox_client.types import Command

__all__ = ["PIPES_FOLDER", "ContainerSettings", "DockerCommands"]

PIPES_FOLDER = "/.tailrace/pipes"
"""Where a container sees its pipes; it can open those whose names it is told, and list none."""

# Standard input comes last: opening it waits for the service.
_BECOME = 'exec >"$2" 2>"$3" <"$1"; cd -- "$4" || exit 126; unset OLDPWD; shift 4; exec "$@"'
_READ_ONLY, _WRITE_ONLY = 0o400, 0o200
_CANNOT_START = 126
_MAX_STRING_BYTES = 128 * 1024 - 1  # the kernel's own limit of one argument
_MAX_COMMAND_BYTES = 1024 * 1024
_POLL_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
_COMMAND_OOM_SCORE = "500"
_SIGNALS = frozenset(int(number) for number in signal.valid_signals())


@dataclass(frozen=True)
class ContainerSettings:
    """What the back-end decides for the commands of a container."""

    container: str
    workdir: str
    environ: Mapping[str, str]
    uid: int
    gid: int
    pipes: Path
    """The folder of its pipes on this host."""
    start_timeout_s: float


class DockerCommands:
    """Starts the commands of one container; see `CommandHost`.

    Args:
        engine: the daemon.
        settings: the container.
        cgroups: the container's.
        gone: makes the error of a sandbox that is lost.
        look_after: declares the sandbox lost if its container is ending.
    """

    def __init__(
        self,
        engine: Engine,
        settings: ContainerSettings,
        cgroups: ContainerCgroups,
        gone: Callable[[], SandboxGone],
        look_after: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._cgroups = cgroups
        self._gone = gone
        self.look_after = look_after
        self._starting: set[asyncio.Task[_DockerCommand]] = set()
        self._running: set[_DockerCommand] = set()
        self._names: dict[int, str] = {}
        self._left: list[CommandCgroup] = []
        self.lost = ""
        """Why the sandbox is not living any more; empty while it is."""

    def require_living(self) -> None:
        """Raises `SandboxGone` if the sandbox is not living."""
        if self.lost:
            raise self._gone()

    def lose(self, why: str) -> None:
        """Declares the sandbox lost; whoever waits is told."""
        if not self.lost:
            self.lost = why
            for command in self._running:
                command.fail(self._gone())

    def new_oom_kills(self) -> int:
        """How many processes were killed for memory since the last call."""
        return self._cgroups.memory.new_oom_kills()

    def pipe_ends(self) -> tuple[int, int]:
        """A new named pipe; its name is that of its writing end until a command has opened it."""
        path = self._make_pipe(_WRITE_ONLY)
        read_fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        write_fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._names[write_fd] = path.name
        return read_fd, write_fd

    async def start(
        self, command: Command, pipes: dict[str, OutputPipe], *, with_stdin: bool
    ) -> Started:
        """Has a command started. If the caller goes away, it is ended as soon as it is there."""
        out = pipes["stdout"].write_fd
        error_fd = out if command.merge_stderr else pipes["stderr"].write_fd
        names = [self._names[out], self._names[error_fd]]
        left = asyncio.Event()
        starting = asyncio.ensure_future(self._start(command, names, left, with_stdin=with_stdin))
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            left.set()
            starting.add_done_callback(_abandon)
            raise
        except _Exhausted as error:
            # As where a shell cannot fork: the commands before this one have left no room.
            with contextlib.suppress(OSError):
                os.write(error_fd, str(error).encode())
            return _NotStarted()
        finally:
            for pipe in pipes.values():
                name = self._names.pop(pipe.write_fd, None)
                if name is not None:
                    (self._settings.pipes / name).unlink(missing_ok=True)
                pipe.close_write()

    async def _start(
        self, command: Command, names: Sequence[str], left: asyncio.Event, *, with_stdin: bool
    ) -> "_DockerCommand":
        argv, environ = self._complete(command)
        stdin = self._make_pipe(_READ_ONLY)
        places = [f"{PIPES_FOLDER}/{name}" for name in (stdin.name, *names)]
        cwd = environ["PWD"]
        user = f"{self._settings.uid}:{self._settings.gid}"
        cgroup = None
        kills = self._cgroups.memory.oom_kills()
        try:
            cgroup = self._cgroups.command()
            exec_id = await self._engine.exec_start(
                self._settings.container,
                ["/bin/sh", "-c", _BECOME, "sh", *places, cwd, *argv],
                environ,
                user=user,
            )
            state = await self._engine.exec_state(exec_id)
            started = _DockerCommand(self, exec_id, state, cgroup)
            self._running.add(started)
            try:
                started.stdin_fd = await self._let_go(started, stdin, left)
            except BaseException:
                started.kill()
                started.forget()
                raise
        except (OSError, NotThereError, SandboxUnavailable) as error:
            if cgroup is not None and not cgroup.remove():
                cgroup.kill()
            self.look_after()
            self.require_living()
            self._explain(error, kills)
        finally:
            stdin.unlink(missing_ok=True)
        if not with_stdin:
            os.close(started.stdin_fd)
            started.stdin_fd = -1
        return started

    def _explain(self, error: Exception, oom_kills_before: int) -> NoReturn:
        """Whose fault it is that a command could not be started."""
        with contextlib.suppress(OSError):
            limit = self._cgroups.exhausted(oom_kills_before)
            if limit:
                raise _Exhausted(limit) from error
        if isinstance(error, SandboxUnavailable):
            raise error
        raise SandboxUnavailable(f"the command could not be started: {error}") from error

    def _complete(self, command: Command) -> tuple[tuple[str, ...], dict[str, str]]:
        """What to execute, and its variables."""
        settings = self._settings
        try:
            cwd = normalize(command.cwd or ".", base=settings.workdir)
        except PathRefusedError as error:
            raise WrongRequest(f"cwd: {error}") from error
        argv = command.argv or direct_argv(command.shell) or ("/bin/sh", "-c", command.shell)
        environ = {**settings.environ, **command.env, "PWD": cwd}
        sizes = [len(os.fsencode(text)) for text in argv]
        sizes += [len(os.fsencode(f"{name}={value}")) for name, value in environ.items()]
        if max(sizes) > _MAX_STRING_BYTES or sum(sizes) > _MAX_COMMAND_BYTES:
            raise TooLarge(
                f"the command with its environment is too long: {sum(sizes)} bytes, of which "
                f"{max(sizes)} in one; at most {_MAX_COMMAND_BYTES} and {_MAX_STRING_BYTES} fit"
            )
        return argv, environ

    async def _let_go(self, command: "_DockerCommand", stdin: Path, left: asyncio.Event) -> int:
        """Puts a waiting command into its cgroup, then opens its input, which lets it go on.

        Not if its sandbox has been lost, or its caller has `left`, while it was being started.
        """
        command.confine()
        end = time.monotonic() + self._settings.start_timeout_s
        for wait_s in _growing():
            if command.ended.done():
                raise SandboxUnavailable("the command ended before it was started")
            self.require_living()
            if left.is_set():
                raise SandboxUnavailable("nobody waits for the command any more")
            command.begins()
            with contextlib.suppress(OSError):
                return os.open(stdin, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if time.monotonic() > end:
                break
            await asyncio.sleep(wait_s)
        raise SandboxUnavailable(
            f"the command did not start within {self._settings.start_timeout_s:g} s"
        )

    def _make_pipe(self, mode: int) -> Path:
        """A pipe that only the commands' user can open, under a name that nobody can guess.

        Its mode leaves even that user one direction only, and the container cannot change it: so no
        other process inside can let a command go, or read what it writes.
        """
        path = self._settings.pipes / secrets.token_hex(16)
        os.mkfifo(path, mode)
        os.chown(path, self._settings.uid, self._settings.gid)
        return path

    async def status(self, exec_id: str, pid_fd: int) -> int:
        """How a command ended, as of wait(2): the kernel tells, or else the daemon."""
        end = time.monotonic() + self._settings.start_timeout_s
        for wait_s in _growing():
            status = await self._status(exec_id, pid_fd)
            if status is not None:
                return status
            if time.monotonic() > end:
                break
            await asyncio.sleep(wait_s)
        raise SandboxUnavailable("neither the kernel nor the daemon tells how the command ended")

    async def _status(self, exec_id: str, pid_fd: int) -> int | None:
        if pid_fd >= 0:
            with contextlib.suppress(NotImplementedError):
                return exit_status(pid_fd)
        state = await self._engine.exec_state(exec_id)
        if state.running or state.exit_code is None:
            return None
        # The daemon tells a signal as a shell does, and a program's own 128 + n no different.
        number = state.exit_code - 128
        return number if number in _SIGNALS else state.exit_code << 8

    def ended(self, command: "_DockerCommand") -> None:
        """Forgets a command; what it leaves running stays in its cgroup."""
        self._running.discard(command)
        self._left = [cgroup for cgroup in self._left if not cgroup.remove()]
        if not command.cgroup.remove():
            self._left.append(command.cgroup)


class _Exhausted(Exception):  # noqa: N818 -- not an error of this program
    """The container has used up a limit of its own, so that nothing can be started in it."""

    def __init__(self, limit: str) -> None:
        super().__init__(f"sh: cannot start: the sandbox's {limit} limit is used up\n")


class _NotStarted:
    """A command that its sandbox had no room for: over at once, as one that cannot be executed."""

    stdin_fd = -1

    def __init__(self) -> None:
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self.ended.set_result(Ended(_CANNOT_START << 8, 0.0, 0.0))

    def kill(self) -> None:
        """Nothing to kill."""

    def forget(self) -> None:
        """Nothing to forget."""


class _DockerCommand:
    """A command in a container, followed by its process."""

    def __init__(
        self, commands: DockerCommands, exec_id: str, state: ExecState, cgroup: CommandCgroup
    ) -> None:
        self._commands = commands
        self._exec_id = exec_id
        self._pid = state.pid
        self.cgroup = cgroup
        self.stdin_fd = -1
        self._killed = False
        self._began_at = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Ended] = self._loop.create_future()
        self.ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._finishing: asyncio.Task[None] | None = None
        self._pid_fd = os.pidfd_open(state.pid) if state.pid else -1
        if self._pid_fd >= 0:
            self._loop.add_reader(self._pid_fd, self._process_ended)
        else:
            self._process_ended()

    def confine(self) -> None:
        """Puts its process into its cgroup, first in line when memory runs out."""
        try:
            Path(f"/proc/{self._pid}/oom_score_adj").write_text(_COMMAND_OOM_SCORE)
            self.cgroup.add(self._pid)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESRCH):  # it has ended
                raise

    def begins(self) -> None:
        """From now on its time counts."""
        self._began_at = time.monotonic()

    def kill(self) -> None:
        """Ends everything that it has started."""
        self._killed = True
        self.cgroup.kill()

    def fail(self, error: SandboxGone) -> None:
        """Its sandbox is lost."""
        if not self.ended.done():
            self.ended.set_exception(error)

    def forget(self) -> None:
        """Nobody asks for its end any more."""
        if self._finishing is not None:
            self._finishing.cancel()
        self._close()
        self.ended.cancel()
        if self._killed:
            self.cgroup.kill()  # what was being born during the first
        self._commands.ended(self)

    def _process_ended(self) -> None:
        wall_s = time.monotonic() - self._began_at
        if self._pid_fd >= 0:
            self._loop.remove_reader(self._pid_fd)
        self._finishing = self._loop.create_task(self._finish(wall_s, self.cgroup.cpu_s()))

    async def _finish(self, wall_s: float, cpu_s: float) -> None:
        try:
            status = await self._commands.status(self._exec_id, self._pid_fd)
            if status == signal.SIGKILL and not self._killed:
                # Its whole container may be ending, which is no result of the command's.
                self._commands.look_after()
            if not self.ended.done():
                self.ended.set_result(Ended(status, wall_s, cpu_s))
        except NotThereError:
            self._commands.lose("its container is gone")
        except Exception as error:
            if not self.ended.done():
                self.ended.set_exception(error)

    def _close(self) -> None:
        if self._pid_fd >= 0:
            self._loop.remove_reader(self._pid_fd)
            os.close(self._pid_fd)
            self._pid_fd = -1


def _abandon(starting: asyncio.Task[_DockerCommand]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        started = starting.result()
        if started.stdin_fd >= 0:
            os.close(started.stdin_fd)
        started.kill()
        started.forget()


def _growing() -> Iterator[float]:
    yield from _POLL_S
    while True:
        yield _POLL_S[-1]
