"""The service's side of the fork-server, be it the launcher in C or the one in Python."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from sandbox_client.backends.local import jail
from sandbox_client.backends.local.host import BasePython
from sandbox_client.backends.local.jail import wire
from sandbox_client.backends.local.jail.boot import CONTROL_FD
from sandbox_client.backends.local.jail.messages import Create
from sandbox_client.backends.local.packets import PacketSender
from sandbox_client.errors import IsolationUnavailable, SandboxUnavailable

__all__ = ["ForkServerProcess", "end_leftover", "write_record"]


class ForkServerProcess:
    """A running fork-server. `on_exit` is called once, when it has ended for whatever reason."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, log: Path) -> None:
        self._process = process
        self._control = control
        self._sender = PacketSender(control, lambda _: self.kill())
        self._log = log
        self._failures: dict[str, Callable[[str], None]] = {}
        self._exited: dict[str, asyncio.Future[None]] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_exit: Callable[[], None] | None = None
        self.alive = True

    @classmethod
    async def start(
        cls, run_dir: Path, python: BasePython, settings: dict[str, object], *, timeout_s: float
    ) -> "ForkServerProcess":
        """Starts it and waits until it serves.

        Raises:
            IsolationUnavailable: it ended at once; the message has its last words.
        """
        code = run_dir / "code"
        _copy_code(code)
        (run_dir / "root").mkdir(exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log = run_dir / "forkserver.log"
        settings_file = run_dir / "settings.json"
        settings_file.write_text(json.dumps(settings))
        program = (
            f"import os, sys; sys.path.insert(0, {str(code)!r}); "
            f"given = {theirs.fileno()}; os.dup2(given, {CONTROL_FD}); "
            f"given == {CONTROL_FD} or os.close(given); "
            "from sandbox_client.backends.local.jail import boot; boot.enter_root(sys.argv[1])"
        )
        with theirs, log.open("wb") as errors:
            process = subprocess.Popen(  # noqa: ASYNC220 -- one exec, and its parent must be us
                [str(python.executable), "-I", "-S", "-B", "-c", program, str(settings_file)],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=[theirs.fileno()],
                env={},
                # A terminal's Ctrl-C is for the service, which then ends its sandboxes in order.
                start_new_session=True,
            )
        ours.setblocking(False)
        self = cls(process, ours, log)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read)
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready
        except TimeoutError:
            self.kill()
            raise IsolationUnavailable(
                f"the fork-server did not start within {timeout_s:g} s: {self._last_words()}"
            ) from None
        return self

    def on_exit(self, callback: Callable[[], None]) -> None:
        """Sets what to call when the process has ended."""
        self._on_exit = callback

    def create(
        self,
        asked: Create,
        fds: Sequence[int],
        on_failure: Callable[[str], None],
    ) -> None:
        """Asks for a sandbox, whose first process then reports on its own channel.

        `on_failure` is called if there will be no such process. `end` has to follow in any case.

        Raises:
            SandboxUnavailable: the fork-server cannot be asked.
        """
        self._send(*asked.fields(), fds=fds)
        self._failures[asked.sandbox_id] = on_failure
        self._exited[asked.sandbox_id] = asyncio.get_running_loop().create_future()

    async def end(self, sandbox_id: str, *, timeout_s: float) -> None:
        """Kills a sandbox and waits until no process of it is left."""
        exited = self._exited.get(sandbox_id)
        if exited is None or not self.alive:
            return
        if not exited.done():
            self._send("kill", sandbox_id)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(exited)
        except TimeoutError:
            raise SandboxUnavailable(
                f"sandbox {sandbox_id} did not end within {timeout_s:g} s"
            ) from None
        finally:
            self._exited.pop(sandbox_id, None)
            self._failures.pop(sandbox_id, None)

    def kill(self) -> None:
        """Ends the fork-server and with it every sandbox."""
        self._process.kill()

    async def stop(self) -> None:
        """Ends the fork-server and waits for it."""
        self.kill()
        await asyncio.to_thread(self._process.wait)
        self._ended()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def _send(self, *fields: wire.Field, fds: Sequence[int] = ()) -> None:
        try:
            self._sender.send(*fields, fds=fds)
        except OSError as error:
            raise SandboxUnavailable(
                f"the fork-server cannot be asked: {error.strerror}"
            ) from error

    def _read(self) -> None:
        try:
            while True:
                received = wire.receive(self._control)
                if received is None:
                    self._ended()
                    return
                self._handle(received[0])
        except BlockingIOError:
            return
        except ConnectionError:
            self._ended()

    def _handle(self, fields: wire.Reader) -> None:
        match fields.text():
            case "serving":
                if not self._ready.done():
                    self._ready.set_result(None)
            case "failed":
                self._failed(fields.text(), f"the host cannot start a sandbox: {fields.text()}")
            case "exited":
                exited = self._exited.get(fields.text())
                if exited is not None and not exited.done():
                    exited.set_result(None)

    def _failed(self, sandbox_id: str, why: str) -> None:
        on_failure = self._failures.pop(sandbox_id, None)
        if on_failure is not None:
            on_failure(why)
        exited = self._exited.get(sandbox_id)
        if exited is not None and not exited.done():
            exited.set_result(None)

    def _ended(self) -> None:
        if not self.alive:
            return
        self.alive = False
        self._sender.close()
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        self._process.kill()
        words = self._last_words()
        if not self._ready.done():
            self._ready.set_exception(
                IsolationUnavailable(f"this host cannot isolate sandboxes: {words}")
            )
        for sandbox_id in list(self._failures):
            self._failed(sandbox_id, f"the fork-server ended: {words}")
        for exited in self._exited.values():
            if not exited.done():
                # The kernel ends every sandbox with its parent.
                exited.set_result(None)
        if self._on_exit is not None:
            self._on_exit()

    def _last_words(self) -> str:
        try:
            text = self._log.read_text(errors="replace").strip()
        except OSError:
            text = ""
        lines = text.splitlines()
        return lines[-1] if lines else "it left no message"


def _copy_code(target: Path) -> None:
    """Lays out the jail's modules alone, in packages that import nothing else."""
    if target.exists():
        shutil.rmtree(target)
    source = Path(jail.__file__).parent
    folder = target / "sandbox_client" / "backends" / "local" / "jail"
    folder.mkdir(parents=True)
    for module in source.glob("*.py"):
        shutil.copyfile(module, folder / module.name)
    for package in list(folder.parents)[:3]:
        (package / "__init__.py").touch()


def end_leftover(record: Path) -> bool:
    """Ends the fork-server that a killed service left behind; True if there was one.

    It dies with its service by itself; this is for the moment in between.
    """
    try:
        pid, started = record.read_text().split()
    except (OSError, ValueError):
        return False
    if _start_time(int(pid)) != started:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(pid), signal.SIGKILL)
    return True


def write_record(record: Path, pid: int) -> None:
    """Notes which process a later service would have to end."""
    record.write_text(f"{pid} {_start_time(pid)}")


def _start_time(pid: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]
