"""Commands in a sandbox, each under a supervisor that runs beside it."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any

from e2b import AsyncCommandHandle, AsyncSandbox, CommandExitException

from sandbox_client.backends.base import ExecHooks
from sandbox_client.backends.e2b.config import E2BConfig
from sandbox_client.backends.e2b.errors import sdk_errors, translated
from sandbox_client.backends.e2b.guest import command_line
from sandbox_client.backends.e2b.lines import LineReader, input_line
from sandbox_client.backends.running import own
from sandbox_client.core.paths import PathRefusedError, normalize
from sandbox_client.errors import SandboxUnavailable, TooLarge, WrongRequest
from sandbox_client.types import Command, ExecResult

__all__ = ["CommandRunner"]

logger = logging.getLogger(__name__)

_STREAMS = {"o": "stdout", "e": "stderr"}
_INPUT_BYTES = 48 * 1024
_KILLED = 137
_CANNOT_RUN = (126, 127)
_START_GRACE_S = 60.0
# The kernel's bound of one argument, less what the SDK's shell adds.
_MAX_LINE_BYTES = 128 * 1024 - 4096


class CommandRunner:
    """Runs the commands of one sandbox.

    The supervisor bounds the output inside, so that a flood does not travel, and ends the whole
    tree when the time is over. It may be killed by a command that has its rights; then the command
    counts as killed.
    """

    def __init__(
        self,
        sandbox: AsyncSandbox,
        config: E2BConfig,
        *,
        workdir: str,
        environ: Mapping[str, str],
        kill_grace_s: float,
    ) -> None:
        self._sandbox = sandbox
        self._config = config
        self._workdir = workdir
        self._environ = environ
        self._kill_grace_s = kill_grace_s
        self._cleanups: set[asyncio.Task[None]] = set()

    async def run(self, command: Command, hooks: ExecHooks) -> ExecResult:
        """Runs one command to its end."""
        try:
            cwd = normalize(command.cwd or ".", base=self._workdir)
        except PathRefusedError as error:
            raise WrongRequest(f"cwd: {error}") from error
        user = command.user or self._config.user
        if user == self._config.admin_user:
            user = ""
        elif self._config.admin_user != "root":
            raise WrongRequest(
                f"user {user!r}: commands run as {self._config.user!r} only, as e2b.admin_user is "
                "not root"
            )
        request = {
            "argv": list(command.argv),
            "shell": command.shell,
            "cwd": cwd,
            "env": {**self._environ, **command.env},
            "timeout_s": command.timeout_s,
            "bound": None if hooks.room is not None else command.max_output_bytes,
            "merge_stderr": command.merge_stderr,
            "stdin": hooks.stdin is not None,
            "user": user,
            "mark": secrets.token_hex(8),
        }
        call = _Call(hooks)
        handle = await self._start(request, call)
        overall_s = command.timeout_s + self._kill_grace_s + _START_GRACE_S
        try:
            async with contextlib.AsyncExitStack() as helpers:
                if hooks.stdin is not None:
                    own(helpers, self._feed(handle, hooks.stdin))
                if hooks.killed is not None:
                    own(helpers, self._kill_when(hooks.killed, handle))
                async with asyncio.timeout(overall_s):
                    await call.finished(handle)
        except TimeoutError:
            self._give_up(handle)
            raise SandboxUnavailable(
                f"sandbox {self._sandbox.sandbox_id} does not answer: a command of "
                f"{command.timeout_s:g} s has not ended after {overall_s:g} s"
            ) from None
        except BaseException:
            # The caller has gone away, or the stream is broken: the command must not go on.
            self._give_up(handle)
            raise
        return call.result(command)

    async def close(self) -> None:
        """Ends what still kills commands of callers that went away."""
        for task in self._cleanups:
            task.cancel()
        await asyncio.gather(*self._cleanups, return_exceptions=True)

    async def _start(self, request: dict[str, Any], call: "_Call") -> AsyncCommandHandle[Any]:
        line = command_line(self._config.python, "run", request)
        if len(line) > _MAX_LINE_BYTES:
            raise TooLarge(
                f"the command with its variables takes {len(line)} bytes on the way, at most "
                f"{_MAX_LINE_BYTES} fit; put what is large into a file"
            )
        with sdk_errors("starting a command"):
            return await self._sandbox.commands.run(
                line,
                background=True,
                user=self._config.admin_user,
                cwd="/",
                timeout=0,
                stdin=True,
                on_stdout=call.on_text,
                on_stderr=call.on_complaint,
                retain_output=False,
            )

    async def _feed(self, handle: AsyncCommandHandle[Any], data: AsyncIterator[bytes]) -> None:
        """Passes input on as fast as the command takes it. One that has ended takes no more."""
        try:
            async for part in data:
                for at in range(0, len(part), _INPUT_BYTES):
                    text = input_line(part[at : at + _INPUT_BYTES])
                    await handle.send_stdin(text, request_timeout=0)
            await handle.send_stdin("c\n", request_timeout=0)
        except Exception as error:
            if translated(error, "") is None:
                raise
            logger.debug("input of a command in %s ended: %s", self._sandbox.sandbox_id, error)

    async def _kill_when(self, killed: Awaitable[None], handle: AsyncCommandHandle[Any]) -> None:
        await killed
        await self._kill(handle)

    async def _kill(self, handle: AsyncCommandHandle[Any]) -> None:
        """Asks the supervisor to end the command's tree; if it cannot, ends the supervisor."""
        try:
            await handle.send_stdin("k\n")
        except Exception as error:
            logger.debug("killing a supervisor of %s: %s", self._sandbox.sandbox_id, error)
            with contextlib.suppress(Exception):
                await handle.kill()

    def _give_up(self, handle: AsyncCommandHandle[Any]) -> None:
        async def end() -> None:
            await self._kill(handle)
            await handle.disconnect()

        task = asyncio.get_running_loop().create_task(end())
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)


class _Call:
    """What has come of one command."""

    def __init__(self, hooks: ExecHooks) -> None:
        self._hooks = hooks
        self._reader = LineReader()
        self._kept: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        self._told: dict[str, Any] = {}
        self._has_told = asyncio.Event()
        self._complaint = ""
        self._was_killed = False

    async def on_text(self, text: str) -> None:
        for letter, payload in self._reader.feed(text):
            if letter == "x":
                self._told = payload
                self._has_told.set()
            elif letter in _STREAMS:
                await self._take(_STREAMS[letter], payload)

    async def _take(self, stream: str, data: bytes) -> None:
        hooks = self._hooks
        if hooks.room is None:
            self._kept[stream].append(data)
        else:
            await hooks.room.wait()
        if hooks.on_output is not None:
            hooks.on_output(stream, data)

    def on_complaint(self, text: str) -> None:
        self._complaint = (self._complaint + text)[-1000:]

    async def finished(self, handle: AsyncCommandHandle[Any]) -> None:
        """Returns when the command has ended: its supervisor said so, or was killed itself."""
        ending = asyncio.ensure_future(handle.wait())
        telling = asyncio.ensure_future(self._has_told.wait())
        try:
            await asyncio.wait({ending, telling}, return_when=asyncio.FIRST_COMPLETED)
            if not self._told:
                await self._without_word(ending)
        finally:
            telling.cancel()
            ending.cancel()
            await asyncio.gather(ending, telling, return_exceptions=True)

    async def _without_word(self, ending: "asyncio.Future[Any]") -> None:
        try:
            with sdk_errors("running a command"):
                await ending
        except CommandExitException as error:
            if error.exit_code in _CANNOT_RUN:
                raise SandboxUnavailable(
                    f"the sandbox cannot run commands: {self._complaint.strip()}", retryable=False
                ) from error
            self._was_killed = True
        else:
            self._was_killed = not self._told

    def result(self, command: Command) -> ExecResult:
        """The command's result."""
        told = self._told
        if self._was_killed:
            told = {"exit_code": _KILLED, "signal": 9, "omitted": {}}
        omitted = told["omitted"]
        return ExecResult(
            exit_code=int(told["exit_code"]),
            stdout_bytes=b"".join(self._kept["stdout"]),
            stderr_bytes=b"".join(self._kept["stderr"]),
            signal=int(told["signal"]),
            timed_out=bool(told.get("timed_out", False)),
            out_of_memory=bool(told.get("out_of_memory", False)),
            stdout_omitted_bytes=int(omitted.get("o", 0)),
            stderr_omitted_bytes=int(omitted.get("e", 0)),
            wall_s=float(told.get("wall_s", 0.0)),
            cpu_s=float(told.get("cpu_s", 0.0)),
            max_output_bytes=command.max_output_bytes,
        )
