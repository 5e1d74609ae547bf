"""envd's `process.Process` over Connect: starting commands, their streams, input and ends."""

import contextlib
import posixpath
from collections.abc import AsyncIterator

from service_kit.streams import with_heartbeat
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from sandbox_client.backends.base import ExecHooks
from sandbox_client.config import SandboxServiceConfig
from sandbox_client.e2b_api import messages
from sandbox_client.e2b_api.connect import (
    STREAM_TYPE,
    envelopes,
    frame,
    stream_failure,
    stream_message,
    unary_message,
)
from sandbox_client.e2b_api.errors import EnvdError
from sandbox_client.e2b_api.framing import end_of_stream
from sandbox_client.e2b_api.guests import Guest
from sandbox_client.e2b_api.http import reply
from sandbox_client.e2b_api.messages import ProcessConfig, StartProcess
from sandbox_client.e2b_api.processes import Event, Listener, Process
from sandbox_client.manager import SandboxManager
from sandbox_client.types import Command, ExecResult

__all__ = ["ProcessService"]

_DEFAULT_PING_S = 90.0


class ProcessService:
    """The calls of `process.Process`."""

    def __init__(self, manager: SandboxManager, config: SandboxServiceConfig) -> None:
        self._manager = manager
        self._config = config

    async def start(self, request: Request, guest: Guest) -> Response:
        """Runs a command and streams what it does. It goes on when the stream is left."""
        body = await stream_message(StartProcess, request, self._config.e2b_api)
        if body.pty is not None:
            raise EnvdError("unimplemented", "this endpoint has no pseudo-terminals")
        sandbox = guest.sandbox
        cwd = guest.resolve(body.process.cwd)
        if cwd not in ("/", sandbox.workdir):
            found = await guest.run("test", "-d", cwd)
            if found.exit_code:
                raise EnvdError("invalid_argument", f"cwd '{cwd}' does not exist")
        command = Command(
            argv=self._argv(body.process),
            cwd=cwd,
            env=body.process.envs,
            timeout_s=self._timeout_s(request),
        )

        async def run(hooks: ExecHooks) -> ExecResult:
            return await self._manager.run(sandbox.sandbox_id, command, hooks)

        process = sandbox.processes.start(body, run)
        # Before its task has had a turn, so nothing of the output is missed.
        return self._stream(request, process, process.listen())

    async def connect(self, request: Request, guest: Guest) -> Response:
        """Streams what a running command does from now on."""
        body = await stream_message(messages.ConnectProcess, request, self._config.e2b_api)
        process = guest.sandbox.processes.find(body.process)
        return self._stream(request, process, process.listen())

    def _argv(self, process: ProcessConfig) -> tuple[str, ...]:
        args = process.args
        if (
            not self._config.e2b_api.login_shell
            and posixpath.basename(process.cmd) == "bash"
            and args[:1] == ["-l"]
        ):
            args = args[1:]
        return (process.cmd, *args)

    def _timeout_s(self, request: Request) -> float:
        longest = self._config.exec.max_timeout_s
        header = request.headers.get("connect-timeout-ms", "0")
        if not header.isdecimal():
            raise EnvdError("invalid_argument", f"Connect-Timeout-Ms is {header[:40]!r}, no number")
        return min(int(header) / 1000 or longest, longest)

    def _stream(self, request: Request, process: Process, listener: Listener) -> Response:
        ping = request.headers.get("keepalive-ping-interval", "")
        ping_s = float(ping) if ping.isdecimal() and int(ping) else _DEFAULT_PING_S
        return StreamingResponse(_events(process, listener, ping_s), media_type=STREAM_TYPE)

    async def list(self, request: Request, guest: Guest) -> Response:
        """The running commands."""
        return reply({"processes": [process.info for process in guest.sandbox.processes.running()]})

    async def send_signal(self, request: Request, guest: Guest) -> Response:
        """Kills a command with all that it started."""
        body = await unary_message(messages.SendSignal, request, self._config.e2b_api)
        process = guest.sandbox.processes.find(body.process)
        if body.signal != "SIGNAL_SIGKILL":
            raise EnvdError(
                "unimplemented", f"only SIGNAL_SIGKILL is sent, asked was {body.signal}"
            )
        process.kill()
        return reply({})

    async def send_input(self, request: Request, guest: Guest) -> Response:
        """Gives a command input; answers once it has taken it up."""
        body = await unary_message(messages.SendInput, request, self._config.e2b_api)
        await guest.sandbox.processes.find(body.process).send(_stdin(body.input))
        return reply({})

    async def close_stdin(self, request: Request, guest: Guest) -> Response:
        """Ends a command's input."""
        body = await unary_message(messages.ConnectProcess, request, self._config.e2b_api)
        await guest.sandbox.processes.find(body.process).send(None)
        return reply({})

    async def stream_input(self, request: Request, guest: Guest) -> Response:
        """Gives a command input as it comes; errors come in the response's end."""
        try:
            await self._take_input(request, guest)
        except EnvdError as error:
            return stream_failure(error)
        return Response(frame({}) + end_of_stream(), media_type=STREAM_TYPE)

    async def _take_input(self, request: Request, guest: Guest) -> None:
        process: Process | None = None
        async with contextlib.aclosing(envelopes(request, self._config.e2b_api)) as parts:
            async for part in parts:
                message = messages.envd_message(messages.StreamInput, part.data)
                if message.start is not None:
                    process = guest.sandbox.processes.find(message.start.process)
                elif message.data is not None:
                    if process is None:
                        raise EnvdError("invalid_argument", "data came before the start event")
                    await process.send(_stdin(message.data.input))

    async def update(self, request: Request, guest: Guest) -> Response:
        """Resizes a pseudo-terminal, of which there are none."""
        raise EnvdError("unimplemented", "this endpoint has no pseudo-terminals")


async def _events(process: Process, listener: Listener, ping_s: float) -> AsyncIterator[bytes]:
    def ping() -> Event:
        return {"event": {"keepalive": {}}}

    try:
        yield frame({"event": {"start": {"pid": process.pid}}})
        beating = with_heartbeat(listener, ping_s, ping)
        async with contextlib.aclosing(beating):  # type: ignore[type-var]
            async for event in beating:
                yield frame(event)
        yield end_of_stream()
    except EnvdError as error:
        yield end_of_stream(error.body)
    finally:
        process.leave(listener)


def _stdin(given: messages.ProcessInput) -> bytes:
    if given.stdin is None:
        raise EnvdError("invalid_argument", "this endpoint takes input for stdin only")
    return given.stdin
