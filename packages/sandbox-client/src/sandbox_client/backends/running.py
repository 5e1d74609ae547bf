"""Running a command to its end, wherever its process is: bounded output, input, timeouts, kills."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from sandbox_client.backends.base import ExecHooks
from sandbox_client.backends.pipes import OutputPipe, feed_stdin
from sandbox_client.types import Command, ExecResult

__all__ = ["CommandHost", "CommandRunner", "Ended", "Started", "own"]

_MAX_BACKGROUND_PIPES = 64


@dataclass(frozen=True)
class Ended:
    """How a command's process ended."""

    status: int
    """As of wait(2)."""
    wall_s: float
    cpu_s: float


class Started(Protocol):
    """A command that has been started. `ended` fails with `SandboxGone` if its sandbox is lost."""

    ended: asyncio.Future[Ended]
    stdin_fd: int
    """Where to write its input, or -1."""

    def kill(self) -> None:
        """Ends all that it has started. Repeatable."""

    def forget(self) -> None:
        """Nobody asks for its end any more."""


class CommandHost(Protocol):
    """Where commands run: one sandbox."""

    async def start(
        self, command: Command, pipes: dict[str, OutputPipe], *, with_stdin: bool
    ) -> Started:
        """Starts a command; its writing ends of the pipes are closed here, whatever happens.

        It must not be left half started: if the caller goes away meanwhile, it is ended.
        """

    def pipe_ends(self) -> tuple[int, int]:
        """A new pipe for output: the reading and the writing end."""

    def require_living(self) -> None:
        """Raises `SandboxGone` if the sandbox is not living."""

    def lose(self, why: str) -> None:
        """Declares the sandbox lost."""

    def new_oom_kills(self) -> int:
        """How many processes were killed for memory since the last call."""

    @property
    def lost(self) -> str:
        """Why the sandbox is not living any more; empty while it is."""


class CommandRunner:
    """Runs the commands of one sandbox."""

    def __init__(self, host: CommandHost, *, kill_grace_s: float) -> None:
        self._host = host
        self._kill_grace_s = kill_grace_s
        self._background: list[OutputPipe] = []

    def close(self) -> None:
        """Closes the pipes that background processes still held."""
        for pipe in self._background:
            pipe.close()

    async def run(self, command: Command, hooks: ExecHooks) -> ExecResult:
        """Runs one command to its end."""
        self._host.require_living()
        with contextlib.ExitStack() as stack:
            pipes = {}
            for name in ("stdout",) if command.merge_stderr else ("stdout", "stderr"):
                on_head = partial(hooks.on_output, name) if hooks.on_output else None
                pipes[name] = pipe = OutputPipe(
                    command.max_output_bytes, on_head, self._host.pipe_ends(), hooks.room
                )
                stack.callback(self._retire, pipe)
            return await self._run(command, hooks, pipes)

    async def _run(
        self, command: Command, hooks: ExecHooks, pipes: dict[str, OutputPipe]
    ) -> ExecResult:
        started = await self._host.start(command, pipes, with_stdin=hooks.stdin is not None)
        ended = started.ended
        overdue = False

        def time_over() -> None:
            nonlocal overdue
            if not ended.done():
                overdue = True
                self._kill(started)

        timer = asyncio.get_running_loop().call_later(command.timeout_s, time_over)
        try:
            async with contextlib.AsyncExitStack() as helpers:
                if started.stdin_fd >= 0 and hooks.stdin is not None:
                    own(helpers, feed_stdin(started.stdin_fd, hooks.stdin))
                if hooks.killed is not None:
                    own(helpers, _when(hooks.killed, lambda: self._kill(started)))
                outcome = await ended
            return self._result(command, outcome, pipes, overdue=overdue)
        finally:
            timer.cancel()
            if not ended.done() or ended.cancelled():
                # The caller has gone away: so must the command.
                self._kill(started)
            started.forget()

    def _result(
        self,
        command: Command,
        outcome: Ended,
        pipes: dict[str, OutputPipe],
        *,
        overdue: bool,
    ) -> ExecResult:
        status = outcome.status
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
            out_of_memory=killed and self._host.new_oom_kills() > 0,
            stdout_omitted_bytes=pipes["stdout"].omitted_bytes,
            stderr_omitted_bytes=pipes["stderr"].omitted_bytes if "stderr" in pipes else 0,
            wall_s=outcome.wall_s,
            cpu_s=outcome.cpu_s,
            max_output_bytes=command.max_output_bytes,
        )

    def _kill(self, started: Started) -> None:
        """Ends a command's tree; if that does not help in time, the whole sandbox."""
        started.kill()
        if not self._host.lost:
            loop = asyncio.get_running_loop()
            loop.call_later(self._kill_grace_s, self._give_up_on, started.ended)

    def _give_up_on(self, ended: asyncio.Future[Ended]) -> None:
        if not ended.done():
            self._host.lose(f"a killed command did not end within {self._kill_grace_s:g} s")

    def _retire(self, pipe: OutputPipe) -> None:
        """Keeps draining a pipe that a background process holds; not too many of them."""
        if pipe.closed or self._host.lost:
            pipe.close()
            return
        self._background = [p for p in self._background if not p.closed]
        if len(self._background) >= _MAX_BACKGROUND_PIPES:
            self._background.pop(0).close()
        pipe.watch()
        self._background.append(pipe)


async def _when(event: Awaitable[None], act: Callable[[], None]) -> None:
    await event
    act()


def own(helpers: contextlib.AsyncExitStack, work: Awaitable[None]) -> None:
    """Runs something beside a command; it ends with the command."""
    task = asyncio.ensure_future(work)

    async def stop() -> None:
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(outcome, Exception):
            raise outcome

    helpers.push_async_callback(stop)
