"""Running commands in one sandbox, seen from the service: pipes, bounded output, timeouts."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Mapping
from functools import partial

from sandbox_client.backends.base import ExecHooks
from sandbox_client.backends.local.cgroups import SandboxCgroup
from sandbox_client.backends.local.init_channel import InitChannel
from sandbox_client.backends.local.jail import wire
from sandbox_client.backends.local.pipes import OutputPipe, feed_stdin
from sandbox_client.core.commands import direct_argv
from sandbox_client.core.paths import PathRefusedError, normalize
from sandbox_client.errors import SandboxGone, WrongRequest
from sandbox_client.types import Command, ExecResult

__all__ = ["CommandRunner"]

_MAX_BACKGROUND_PIPES = 64


class CommandRunner:
    """Runs the commands of one sandbox."""

    def __init__(
        self,
        channel: InitChannel,
        cgroup: SandboxCgroup,
        *,
        workdir: str,
        environ: Mapping[str, str],
        kill_grace_s: float,
    ) -> None:
        self._channel = channel
        self._cgroup = cgroup
        self._workdir = workdir
        self._environ = environ
        self._kill_grace_s = kill_grace_s
        self._background: list[OutputPipe] = []

    def close(self) -> None:
        """Closes the pipes that background processes still held."""
        for pipe in self._background:
            pipe.close()

    async def run(self, command: Command, hooks: ExecHooks) -> ExecResult:
        """Runs one command to its end."""
        self._channel.require_living()
        with contextlib.ExitStack() as stack:
            pipes = {}
            for name in ("stdout",) if command.merge_stderr else ("stdout", "stderr"):
                on_head = partial(hooks.on_output, name) if hooks.on_output else None
                pipes[name] = pipe = OutputPipe(command.max_output_bytes, on_head)
                stack.callback(self._retire, pipe)
            return await self._run(command, hooks, pipes)

    async def _run(
        self, command: Command, hooks: ExecHooks, pipes: dict[str, OutputPipe]
    ) -> ExecResult:
        number, ended = self._channel.expect_end()
        overdue = False

        def time_over() -> None:
            nonlocal overdue
            if not ended.done():
                overdue = True
                self._kill(number, ended)

        try:
            stdin_fd = self._start(number, command, pipes, with_stdin=hooks.stdin is not None)
            timer = asyncio.get_running_loop().call_later(command.timeout_s, time_over)
            try:
                async with contextlib.AsyncExitStack() as helpers:
                    if stdin_fd >= 0 and hooks.stdin is not None:
                        _own(helpers, feed_stdin(stdin_fd, hooks.stdin))
                    if hooks.killed is not None:
                        _own(helpers, self._kill_when(hooks.killed, number, ended))
                    message = await ended
                return self._result(command, message, pipes, overdue=overdue)
            finally:
                timer.cancel()
        finally:
            if not ended.done() or ended.cancelled():
                # The caller has gone away: so must the command.
                self._kill(number, ended)
            self._channel.forget(number)

    def _start(
        self, number: int, command: Command, pipes: dict[str, OutputPipe], *, with_stdin: bool
    ) -> int:
        """Passes the command on; returns the descriptor to write its input to, or -1."""
        try:
            cwd = normalize(command.cwd or ".", base=self._workdir)
        except PathRefusedError as error:
            raise WrongRequest(f"cwd: {error}") from error
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC) if with_stdin else (_dev_null(), -1)
        out = pipes["stdout"].write_fd
        message: wire.Message = {
            "op": "exec",
            "exec": number,
            "argv": command.argv or direct_argv(command.shell) or (),
            "shell": None if command.argv else command.shell,
            "cwd": cwd,
            "env": {**self._environ, **command.env, "PWD": cwd},
        }
        try:
            error_fd = out if command.merge_stderr else pipes["stderr"].write_fd
            self._channel.send(message, [read_fd, out, error_fd])
        except BaseException:
            if write_fd >= 0:
                os.close(write_fd)
            raise
        finally:
            os.close(read_fd)
            for pipe in pipes.values():
                pipe.close_write()
        return write_fd

    def _result(
        self,
        command: Command,
        message: wire.Message,
        pipes: dict[str, OutputPipe],
        *,
        overdue: bool,
    ) -> ExecResult:
        status = int(message["status"])
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        code = 128 + number if number else os.WEXITSTATUS(status)
        # It may have ended by itself just before it was killed.
        timed_out = overdue and number == signal.SIGKILL
        # A shell reports a child that was killed as 128 + 9; only then is it worth looking.
        killed = code == 128 + signal.SIGKILL and not timed_out
        kept = {name: pipe.finish() for name, pipe in pipes.items()}
        return ExecResult(
            exit_code=code,
            stdout_bytes=kept["stdout"],
            stderr_bytes=kept.get("stderr", b""),
            signal=number,
            timed_out=timed_out,
            out_of_memory=killed and self._cgroup.new_oom_kills() > 0,
            stdout_omitted_bytes=pipes["stdout"].omitted_bytes,
            stderr_omitted_bytes=pipes["stderr"].omitted_bytes if "stderr" in pipes else 0,
            wall_s=float(message["wall_s"]),
            cpu_s=float(message["cpu_s"]),
            max_output_bytes=command.max_output_bytes,
        )

    def _kill(self, number: int, ended: asyncio.Future[wire.Message]) -> None:
        """Ends a command's tree; if that does not help in time, the whole sandbox."""
        try:
            self._channel.send({"op": "kill", "exec": number})
        except SandboxGone:
            return  # then nothing of it runs any more
        asyncio.get_running_loop().call_later(self._kill_grace_s, self._give_up_on, ended)

    def _give_up_on(self, ended: asyncio.Future[wire.Message]) -> None:
        if not ended.done():
            self._channel.lose(f"a killed command did not end within {self._kill_grace_s:g} s")

    async def _kill_when(
        self, killed: Awaitable[None], number: int, ended: asyncio.Future[wire.Message]
    ) -> None:
        await killed
        self._kill(number, ended)

    def _retire(self, pipe: OutputPipe) -> None:
        """Keeps draining a pipe that a background process holds; not too many of them."""
        if pipe.closed or self._channel.lost:
            pipe.close()
            return
        self._background = [p for p in self._background if not p.closed]
        if len(self._background) >= _MAX_BACKGROUND_PIPES:
            self._background.pop(0).close()
        pipe.watch()
        self._background.append(pipe)


def _own(helpers: contextlib.AsyncExitStack, work: Awaitable[None]) -> None:
    """Runs something beside a command; it ends with the command."""
    task = asyncio.ensure_future(work)

    async def stop() -> None:
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(outcome, Exception):
            raise outcome

    helpers.push_async_callback(stop)


_null_fd: list[int] = []


def _dev_null() -> int:
    if not _null_fd:
        _null_fd.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    return os.dup(_null_fd[0])
