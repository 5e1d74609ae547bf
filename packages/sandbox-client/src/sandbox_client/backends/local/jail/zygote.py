"""A warm interpreter in a sandbox whose first process is the launcher's: runs Python programs.

It joins the sandbox when the first program is asked for, and then is a process of the sandbox like
any other, but that its memory is closed to the commands. Each program is a fork of it. See
`launcher/init.c`, which asks for them on behalf of the service; the stand-ins ask by themselves.
"""

import os
import resource
import select
import signal
import socket
from contextlib import suppress

from sandbox_client.backends.local.jail import wire
from sandbox_client.backends.local.jail.forking import Forking, leave
from sandbox_client.backends.local.jail.python_args import PythonRun, parse_python
from sandbox_client.backends.local.jail.shims import Shims

__all__ = ["Zygote"]

_LIMITS = sorted({getattr(resource, n) for n in dir(resource) if n.startswith("RLIMIT_")})


class Zygote:
    """Its loop. `serve` returns only in a forked child that is to run a Python program."""

    def __init__(self, channel: socket.socket, listener: socket.socket, oom_fd: int) -> None:
        self._channel = channel
        self._forking = Forking(oom_fd)
        self._poll = select.poll()
        self._shims = Shims(self._poll, listener)
        self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._bounds = _bounds()

    def serve(self) -> PythonRun:
        """Works until the first process goes away, then ends the process."""
        signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        self._shims.attach()
        for fd in (self._channel.fileno(), self._wake[0]):
            self._poll.register(fd, select.POLLIN)
        try:
            wire.send(self._channel, "ready", os.getpid())
            while True:
                for fd, _ in self._poll.poll():
                    run = self._handle(fd)
                    if run is not None:
                        return run
        except (BrokenPipeError, ConnectionError):
            os._exit(0)

    def rehearse_once(self) -> PythonRun | None:
        """Takes one program and sees it to its end; see `rehearsal`."""
        run = self._from_first_process()
        if run is None:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            self._reap()
        return run

    def close(self) -> None:
        """Lets go of everything, after a rehearsal."""
        self._channel.close()
        self._shims.close()
        for fd in self._wake:
            os.close(fd)

    def _handle(self, fd: int) -> PythonRun | None:
        if fd == self._channel.fileno():
            return self._from_first_process()
        if fd == self._wake[0]:
            os.read(fd, 4096)
            self._reap()
        elif fd in self._shims:
            return self._from_shim(fd)
        return None

    def _from_first_process(self) -> PythonRun | None:
        received = wire.receive(self._channel, max_fds=3)
        if received is None:
            os._exit(0)
        fields, fds = received
        fields.text()
        number, executable, cwd, argv = fields.text(), fields.text(), fields.text(), fields.texts()
        environ = dict(variable.split("=", 1) for variable in fields.rest())
        run = parse_python(argv, environ, cwd)
        pid = self._fork() if run is not None else -1
        if run is not None and pid == 0:
            self._tell_started("started", number)
            run.executable = executable
            self._leave(fds)
            return run
        for fd in fds:
            os.close(fd)
        if pid < 0:
            wire.send(self._channel, "refused", number)
        else:
            # Again: the program's process may have been killed before it could.
            wire.send(self._channel, "started", number, pid)
        return None

    def _from_shim(self, fd: int) -> PythonRun | None:
        asked = self._shims.read(fd)
        if asked is None:
            return None
        pid = self._fork()
        if pid == 0:
            asked.tell_started()
            self._tell_started("shim", asked.peer)
            self._leave(asked.fds)
            return asked.run
        if pid < 0:
            self._shims.refuse(asked)
        else:
            self._shims.started(asked, pid)
        return None

    def _tell_started(self, kind: str, whose: wire.Field) -> None:
        """In the program's process: it may end the interpreter, and must not be run again then."""
        with suppress(OSError):
            wire.send(self._channel, kind, whose, os.getpid())

    def _fork(self) -> int:
        """Forks; -1 where the sandbox has no room for another process."""
        if _bounds() != self._bounds:
            # A command may change them, but not for the programs of later ones.
            os._exit(0)
        try:
            return self._forking.fork()
        except OSError:
            if not _has_children():
                os._exit(0)  # leaves its own place to others
            return -1

    def _leave(self, fds: list[int]) -> None:
        self._channel.detach()
        self._shims.detach()
        leave(fds)

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            # Before a stand-in is answered, so that its command has not ended yet.
            spent_us = int((usage.ru_utime + usage.ru_stime) * 1e6)
            wire.send(self._channel, "ended", pid, status, spent_us)
            self._shims.ended(pid, status)


def _bounds() -> list[object]:
    """What a process of the same user can set for this one, and each program inherits."""
    limits = [resource.getrlimit(kind) for kind in _LIMITS]
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    return [limits, priority, os.sched_getscheduler(0), os.sched_getaffinity(0)]


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
