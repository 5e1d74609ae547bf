"""Commands of one local sandbox: its first process starts them and tells of their end."""

import asyncio
import os
from collections.abc import Mapping

from sandbox_client.backends.local.cgroups import SandboxCgroup
from sandbox_client.backends.local.init_channel import InitChannel
from sandbox_client.backends.local.jail.messages import Exec
from sandbox_client.backends.pipes import OutputPipe
from sandbox_client.backends.running import Ended
from sandbox_client.core.commands import direct_argv
from sandbox_client.core.paths import PathRefusedError, normalize
from sandbox_client.errors import SandboxGone, WrongRequest
from sandbox_client.types import Command

__all__ = ["LocalCommands"]


class LocalCommands:
    """Starts the commands of one sandbox; see `CommandHost`."""

    def __init__(
        self,
        channel: InitChannel,
        cgroup: SandboxCgroup,
        *,
        workdir: str,
        environ: Mapping[str, str],
    ) -> None:
        self._channel = channel
        self._cgroup = cgroup
        self._workdir = workdir
        self._environ = environ

    @property
    def lost(self) -> str:
        """Why the sandbox is not living any more; empty while it is."""
        return self._channel.lost

    def lose(self, why: str) -> None:
        """Declares the sandbox lost."""
        self._channel.lose(why)

    def require_living(self) -> None:
        """Raises `SandboxGone` if the sandbox is not living."""
        self._channel.require_living()

    def new_oom_kills(self) -> int:
        """How many processes were killed for memory since the last call."""
        return self._cgroup.new_oom_kills()

    def pipe_ends(self) -> tuple[int, int]:
        """A new pipe."""
        return os.pipe2(os.O_CLOEXEC)

    async def start(
        self, command: Command, pipes: dict[str, OutputPipe], *, with_stdin: bool
    ) -> "_LocalCommand":
        """Passes a command on to the first process."""
        try:
            cwd = normalize(command.cwd or ".", base=self._workdir)
        except PathRefusedError as error:
            raise WrongRequest(f"cwd: {error}") from error
        started = _LocalCommand(self._channel)
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC) if with_stdin else (_dev_null(), -1)
        started.stdin_fd = write_fd
        out = pipes["stdout"].write_fd
        asked = Exec(
            started.number,
            cwd,
            None if command.argv else command.shell,
            command.argv or direct_argv(command.shell) or (),
            {**self._environ, **command.env, "PWD": cwd},
        )
        try:
            error_fd = out if command.merge_stderr else pipes["stderr"].write_fd
            self._channel.send(*asked.fields(), fds=[read_fd, out, error_fd])
        except BaseException:
            if write_fd >= 0:
                os.close(write_fd)
            started.forget()
            raise
        finally:
            os.close(read_fd)
            for pipe in pipes.values():
                pipe.close_write()
        return started


class _LocalCommand:
    """A command that the first process knows by its number."""

    def __init__(self, channel: InitChannel) -> None:
        self._channel = channel
        self.stdin_fd = -1
        self.ended: asyncio.Future[Ended]
        self.number, self.ended = channel.expect_end()

    def kill(self) -> None:
        try:
            self._channel.send("kill", self.number)
        except SandboxGone:
            return  # then nothing of it runs any more

    def forget(self) -> None:
        self._channel.forget(self.number)


_null_fd: list[int] = []


def _dev_null() -> int:
    if not _null_fd:
        _null_fd.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    return os.dup(_null_fd[0])
