"""A warm interpreter in a sandbox whose first process is the launcher's: runs Python programs.

It joins the sandbox when the first program is asked for, and then is a process of the sandbox like
any other, but that its memory is closed to the commands. Each program is a fork of it. See
`launcher/init.c`, which asks for them on behalf of the service; the stand-ins ask by themselves.
"""

import os
import resource
import socket
from contextlib import suppress

from sandbox_client.backends.local.jail import wire
from sandbox_client.backends.local.jail.forking import Forking
from sandbox_client.backends.local.jail.loop import ProgramLoop
from sandbox_client.backends.local.jail.python_args import PythonRun, parse_python

__all__ = ["Zygote"]

_LIMITS = sorted({getattr(resource, n) for n in dir(resource) if n.startswith("RLIMIT_")})


class Zygote(ProgramLoop):
    """Its loop, until the first process goes away."""

    def __init__(self, channel: socket.socket, listener: socket.socket, oom_fd: int) -> None:
        super().__init__(channel, listener)
        self._forking = Forking(oom_fd)
        self._bounds = _bounds()

    def _begin(self) -> None:
        self._shims.attach()
        wire.send(self._channel, "ready", os.getpid())

    def _from_channel(self) -> PythonRun | None:
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
        """Forks; -1 where that must not or cannot be."""
        try:
            # A command may change its bounds, but not for the programs of later ones.
            if _bounds() == self._bounds:
                return self._forking.fork()
        except OSError:
            pass  # the sandbox has no room for another process
        if not _has_children():
            os._exit(0)  # leaves its place to another interpreter, or to other processes
        return -1

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
