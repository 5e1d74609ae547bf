"""The commands of one sandbox as envd has them.

They are numbered, listed, and alive beyond the request that started them. Whoever listens gets the
output from then on; while nobody does, it is dropped.
"""

import asyncio
import base64
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

from service_kit.errors import ServiceError

from sandbox_client.backends.base import ExecHooks
from sandbox_client.e2b_api.errors import EnvdError, envd_error
from sandbox_client.e2b_api.messages import Selector, StartProcess
from sandbox_client.types import ExecResult

__all__ = ["Event", "Process", "Processes", "end_event"]

Event = dict[str, object]
Runner = Callable[[ExecHooks], Awaitable[ExecResult]]

_STDIN_CHUNKS = 4
_FIRST_PID = 1000


class Listener:
    """One reader of a process's events. Iterating ends with the `end` event or an `EnvdError`."""

    def __init__(self, moved: Callable[[], None]) -> None:
        self._moved = moved
        self._events: asyncio.Queue[tuple[int, Event | EnvdError | None]] = asyncio.Queue()
        self.waiting_bytes = 0

    def output(self, stream: str, data: bytes) -> None:
        """Adds output."""
        self.waiting_bytes += len(data)
        text = base64.b64encode(data).decode()
        self._events.put_nowait((len(data), {"event": {"data": {stream: text}}}))

    def end(self, outcome: Event | EnvdError) -> None:
        """Adds the end."""
        self._events.put_nowait((0, outcome))
        self._events.put_nowait((0, None))

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            size, event = await self._events.get()
            if event is None:
                return
            if isinstance(event, EnvdError):
                raise event
            self.waiting_bytes -= size
            self._moved()
            yield event


class Process:
    """One running command. Its pid is a number of this endpoint's, not of the sandbox's kernel."""

    def __init__(self, pid: int, request: StartProcess, backlog_bytes: int) -> None:
        self.pid = pid
        self.config = request.process
        self.tag = request.tag
        self.ended = asyncio.Event()
        self._backlog_bytes = backlog_bytes
        self._listeners: set[Listener] = set()
        self._room = asyncio.Event()
        self._room.set()
        self._killed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stdin: asyncio.Queue[bytes | None] | None = None
        if request.stdin:
            # Bounded: whoever sends waits while the command does not read.
            self._stdin = asyncio.Queue(_STDIN_CHUNKS)

    @property
    def info(self) -> dict[str, object]:
        """As `List` tells it."""
        info = {"pid": self.pid, "config": self.config.model_dump(exclude_defaults=True)}
        return info | {"tag": self.tag} if self.tag else info

    def hooks(self) -> ExecHooks:
        """How the command's output, input and end are connected with this."""
        stdin = None if self._stdin is None else _input(self._stdin)
        return ExecHooks(self._output, stdin, self._killed, self._room)

    def kill(self) -> None:
        """Ends it with all that it started."""
        if not self._killed.done():
            self._killed.set_result(None)

    async def send(self, data: bytes | None) -> None:
        """Gives it input, or with None the input's end; waits while it does not read.

        Raises:
            EnvdError: its input is closed.
        """
        if self._stdin is None:
            raise EnvdError("failed_precondition", "stdin not enabled or closed")
        stdin = self._stdin
        if data is None:
            self._stdin = None
        putting = asyncio.ensure_future(stdin.put(data))
        ending = asyncio.ensure_future(self.ended.wait())
        try:
            await asyncio.wait({putting, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            putting.cancel()
            ending.cancel()

    def listen(self) -> Listener:
        """A new reader; give it back with `leave`."""
        listener = Listener(self._balance)
        self._listeners.add(listener)
        return listener

    def leave(self, listener: Listener) -> None:
        """Takes a reader away."""
        self._listeners.discard(listener)
        self._balance()

    def finish(self, outcome: Event | EnvdError) -> None:
        """Tells every reader how it ended."""
        self.ended.set()
        for listener in self._listeners:
            listener.end(outcome)

    def interrupt(self, error: EnvdError) -> None:
        """Ends every reader with an error; the command itself goes on."""
        for listener in list(self._listeners):
            listener.end(error)
            self.leave(listener)

    def _output(self, stream: str, data: bytes) -> None:
        for listener in self._listeners:
            listener.output(stream, data)
        self._balance()

    def _balance(self) -> None:
        """Lets the command write on while every reader keeps up."""
        if all(listener.waiting_bytes < self._backlog_bytes for listener in self._listeners):
            self._room.set()
        else:
            self._room.clear()


class Processes:
    """The running commands of one sandbox."""

    def __init__(self, limit: int, backlog_bytes: int) -> None:
        self._limit = limit
        self._backlog_bytes = backlog_bytes
        self._next_pid = _FIRST_PID
        self._running: dict[int, Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def running(self) -> list[Process]:
        """Those that run, oldest first."""
        return list(self._running.values())

    def start(self, request: StartProcess, run: Runner) -> Process:
        """Starts a command; `run` runs it with the given hooks.

        Raises:
            EnvdError: too many run already.
        """
        if len(self._running) >= self._limit:
            raise EnvdError(
                "resource_exhausted",
                f"{len(self._running)} commands run in this sandbox, e2b_api.processes allows "
                f"{self._limit}",
            )
        process = Process(self._next_pid, request, self._backlog_bytes)
        self._next_pid += 1
        self._running[process.pid] = process
        task = asyncio.get_running_loop().create_task(self._run(process, run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return process

    def find(self, selector: Selector) -> Process:
        """A running command.

        Raises:
            EnvdError: there is none, or no longer.
        """
        for process in self._running.values():
            if process.pid == selector.pid or (selector.tag and process.tag == selector.tag):
                return process
        raise EnvdError("not_found", f"process with {selector.pid or selector.tag!r} not found")

    def interrupt(self, error: EnvdError) -> None:
        """Ends every stream with an error; the commands go on."""
        for process in self._running.values():
            process.interrupt(error)

    async def ended(self) -> None:
        """Returns when none runs any more."""
        await asyncio.gather(*self._tasks)

    async def _run(self, process: Process, run: Runner) -> None:
        outcome: Event | EnvdError = EnvdError("internal", "the command was given up")
        try:
            outcome = end_event(await run(process.hooks()))
        except ServiceError as error:
            outcome = envd_error(error)
        except EnvdError as error:
            outcome = error
        finally:
            del self._running[process.pid]
            process.finish(outcome)


def end_event(result: ExecResult) -> Event | EnvdError:
    """How envd tells a command's end; a timeout is an error there."""
    if result.timed_out:
        return EnvdError("deadline_exceeded", "the command was killed: its time was over")
    if result.signal:
        # As Go's os.ProcessState has it.
        status = f"signal: {(signal.strsignal(result.signal) or str(result.signal)).lower()}"
        end: dict[str, object] = {"exitCode": -1, "status": status, "error": status}
    else:
        status = f"exit status {result.exit_code}"
        end = {"exitCode": result.exit_code, "exited": True, "status": status}
        if result.exit_code:
            end["error"] = status
    return {"event": {"end": end}}


async def _input(queue: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
    while (part := await queue.get()) is not None:
        yield part
