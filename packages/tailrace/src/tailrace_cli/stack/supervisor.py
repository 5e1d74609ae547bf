"""Runs a stack's processes: starts them in order, watches them, restarts them, drains them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w

from tailrace_cli.stack import tether
from tailrace_cli.stack.health import is_serving, port_is_free
from tailrace_cli.stack.spec import ProcessSpec, StackSpec, dump_stack, start_order

log = logging.getLogger(__name__)

State = Literal["waiting", "starting", "healthy", "restarting", "ended", "failed"]
RESOLVED = "resolved-stack.toml"
"""In the state folder: the stack file with its variables filled in."""
BAD_INPUT = 2
"""Exit code of a process that refused its configuration: restarting cannot help."""


class StackError(Exception):
    """The stack cannot start or go on. `exit_code` is 2 when bad input is the reason."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class ProcessStatus:
    """How one process is doing."""

    name: str
    state: State
    pid: int | None
    restarts: int
    address: str
    log_file: Path


def _tethered(command: Sequence[str]) -> list[str]:
    """The command, killed when the supervisor dies, so that no stack outlives its command line."""
    # Without site-packages: it needs none, and starts in milliseconds.
    return [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *command]


class _Process:
    """One supervised process and its restarts."""

    def __init__(self, spec: ProcessSpec, stack: StackSpec, clock: Callable[[], float]) -> None:
        self.spec = spec
        self._stack = stack
        self._clock = clock
        self.state: State = "waiting"
        self.restarts = 0
        self.handle: asyncio.subprocess.Process | None = None
        self.log_file = stack.state_dir / "logs" / f"{spec.name}.log"
        self.healthy = asyncio.Event()
        self.stopping = False

    async def start(self) -> None:
        """Starts the process; its output goes to the log file."""
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        config = self._stack.state_dir / "config" / f"{self.spec.name}.toml"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(tomli_w.dumps(dict(self.spec.config)))
        self.state = "starting"
        with self.log_file.open("ab") as output:
            self.handle = await asyncio.create_subprocess_exec(
                *_tethered(
                    [
                        sys.executable,
                        "-m",
                        self.spec.module,
                        self.spec.command,
                        "--config",
                        str(config),
                        *self.spec.arguments,
                    ]
                ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.spec.environment},
                start_new_session=True,
            )

    async def wait_healthy(self) -> None:
        """Returns at the first successful health check.

        Raises:
            StackError: it ended or stayed unhealthy for longer than its start timeout.
        """
        handle = self.handle
        assert handle is not None
        deadline = self._clock() + self.spec.start_timeout_s
        while not await is_serving(self.spec):
            if handle.returncode is not None:
                raise StackError(
                    f"{self.spec.name} ended with exit code {handle.returncode} while starting:\n"
                    + self.tail(),
                    exit_code=BAD_INPUT if handle.returncode == BAD_INPUT else 1,
                )
            if self._clock() > deadline:
                raise StackError(
                    f"{self.spec.name} did not answer at {self.spec.address} within "
                    f"{self.spec.start_timeout_s:.0f} s; see {self.log_file}:\n" + self.tail()
                )
            await asyncio.sleep(0.1)
        self.state = "healthy"
        self.healthy.set()

    def tail(self, lines: int = 12) -> str:
        """The last lines of its log."""
        if not self.log_file.exists():
            return ""
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])

    async def keep(self) -> None:
        """Watches the process and restarts it until it is stopped.

        Raises:
            StackError: it refused its input, or restarting did not help.
        """
        policy = self._stack.restart
        in_a_row = 0
        while True:
            assert self.handle is not None
            started = self._clock()
            code = await self.handle.wait()
            self.healthy.clear()
            if self.stopping:
                self.state = "ended"
                return
            in_a_row = 1 if self._clock() - started > policy.healthy_after_s else in_a_row + 1
            if code == BAD_INPUT or not policy.enabled or in_a_row > policy.max_in_a_row:
                self.state = "failed"
                raise StackError(
                    f"{self.spec.name} ended with exit code {code}; see {self.log_file}:\n"
                    + self.tail(),
                    exit_code=BAD_INPUT if code == BAD_INPUT else 1,
                )
            self.state = "restarting"
            self.restarts += 1
            pause_s = min(policy.backoff_s * 2 ** (in_a_row - 1), policy.backoff_max_s)
            log.warning(
                "%s ended with %s; starting it again in %.1f s", self.spec.name, code, pause_s
            )
            await asyncio.sleep(pause_s)
            if self.stopping:  # stop() sets it meanwhile
                return  # type: ignore[unreachable]
            await self.start()
            with contextlib.suppress(StackError):  # its end shows in the next round
                await self.wait_healthy()

    async def stop(self, drain_s: float) -> None:
        """SIGTERM, and SIGKILL to what is left after `drain_s`."""
        self.stopping = True
        if self.handle is None or self.handle.returncode is not None:
            self.state = "ended"
            return
        with contextlib.suppress(ProcessLookupError):
            self.handle.terminate()
        try:
            await asyncio.wait_for(self.handle.wait(), drain_s)
        except TimeoutError:
            log.warning("%s did not end within %.0f s; killing it", self.spec.name, drain_s)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.handle.pid, signal.SIGKILL)
            await self.handle.wait()
        self.state = "ended"


class Supervisor:
    """A running stack. Use `async with Supervisor(spec).running() as supervisor`."""

    def __init__(self, spec: StackSpec, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.spec = spec
        self._processes = {p.name: _Process(p, spec, clock) for p in spec.processes}

    def statuses(self) -> list[ProcessStatus]:
        """All processes in the order of the stack file."""
        return [
            ProcessStatus(
                name=p.spec.name,
                state=p.state,
                pid=p.handle.pid if p.handle else None,
                restarts=p.restarts,
                address=p.spec.address,
                log_file=p.log_file,
            )
            for p in self._processes.values()
        ]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Supervisor]:
        """Starts everything, restarts what ends, stops everything on the way out.

        Raises:
            StackError: a port is taken, or a process cannot start or keeps ending.
        """
        self._refuse_busy_ports()
        self.spec.state_dir.mkdir(parents=True, exist_ok=True)
        # `tailrace status` finds the stack by it, whatever ports it was given.
        (self.spec.state_dir / RESOLVED).write_text(dump_stack(self.spec))
        try:
            await self._start_all()
            async with _background(p.keep() for p in self._processes.values()):
                yield self
        finally:
            await self._stop_all()

    def _refuse_busy_ports(self) -> None:
        for process in self.spec.processes:
            if not port_is_free(process.target):
                raise StackError(
                    f"{process.name} cannot listen on {process.target}: something else does; "
                    "stop it or choose another port in the stack file",
                    exit_code=BAD_INPUT,
                )

    async def _start_all(self) -> None:
        for wave in start_order(self.spec.processes):
            members = [self._processes[p.name] for p in wave]
            for process in members:
                await process.start()
            for process in members:
                await process.wait_healthy()

    async def _stop_all(self) -> None:
        for wave in reversed(start_order(self.spec.processes)):
            async with asyncio.TaskGroup() as group:
                for spec in wave:
                    group.create_task(self._processes[spec.name].stop(self.spec.drain_s))


@contextlib.asynccontextmanager
async def _background(coroutines: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Runs coroutines beside the body: the first that fails ends it, and its end ends them."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(c) for c in coroutines]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        # The body's caller expects its own exception, not a group around it.
        raise errors.exceptions[0] from None
