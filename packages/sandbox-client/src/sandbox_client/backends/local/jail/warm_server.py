"""The warm interpreter beside the launcher: joins a sandbox, in a fork, when one asks for Python.

Like the launcher it holds root's capabilities and runs no foreign code; it reads messages of the
launcher alone, which say how to join a sandbox and nothing that a sandbox has written.
"""

import os
import select
import signal
import socket
from contextlib import suppress

from sandbox_client.backends.local.jail import kernel, wire
from sandbox_client.backends.local.jail.python_args import PythonRun
from sandbox_client.backends.local.jail.rehearsal import rehearse_zygote
from sandbox_client.backends.local.jail.walls import Settings, Walls
from sandbox_client.backends.local.jail.zygote import Zygote

__all__ = ["WarmServer"]

_ALL_BUT_PIDS = kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWNET


class WarmServer:
    """Its loop. `serve` returns only in a process that is to run Python code."""

    def __init__(self, launcher: socket.socket, settings: Settings) -> None:
        self._launcher = launcher
        self._walls = Walls(settings)
        self._own_pidfd = os.pidfd_open(os.getpid())

    def prepare(self) -> None:
        """Does once what every sandbox's interpreter inherits."""
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.clear_inheritable_capabilities()
        kernel.drop_bounding_set()
        os.umask(0o022)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        rehearse_zygote(dict(os.environ))
        kernel.mount("proc", "/proc", "proc")
        self._walls.prepare()
        kernel.umount("/proc")

    def serve(self) -> PythonRun | None:
        """Works until the launcher goes away. Returns a program to run in a sandbox's process."""
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _wake)
        poll = select.poll()
        poll.register(self._launcher, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        wire.send(self._launcher, "ready", os.getpid())
        while True:
            ready = dict(poll.poll())
            if wake_read in ready:
                os.read(wake_read, 4096)
                _reap()
            if self._launcher.fileno() not in ready:
                continue
            received = wire.receive(self._launcher, max_fds=8)
            if received is None:
                return None
            fields, fds = received
            fields.text()
            limits = [int(text) for text in fields.texts()]
            zygote = self._join(tuple(zip(limits[::2], limits[1::2], strict=True)), fds)
            if zygote is not None:
                os.close(wake_read)
                os.close(wake_write)
                return zygote.serve()
            for fd in fds:
                os.close(fd)

    def _join(self, rlimits: tuple[tuple[int, int], ...], fds: list[int]) -> Zygote | None:
        """Forks into a sandbox; returns what to do there in the child, and None in the parent.

        Where that fails, the sandbox sees its end of the channel closed.
        """
        pidfd, channel, listener, *cgroups = fds
        try:
            kernel.setns(pidfd, kernel.CLONE_NEWPID)
        except OSError:
            return None  # it has ended
        pid = -1
        try:
            pid = kernel.fork()
        except OSError:
            return None  # the host has no room for another process
        finally:
            if pid != 0:
                kernel.setns(self._own_pidfd, kernel.CLONE_NEWPID)
        if pid != 0:
            return None
        try:
            return self._become_zygote(pidfd, channel, listener, cgroups, rlimits)
        except ProcessLookupError:
            os._exit(1)  # the sandbox has just ended
        except OSError as error:
            os.write(2, f"a warm interpreter cannot join a sandbox: {error}\n".encode())
            os._exit(1)

    def _become_zygote(
        self,
        pidfd: int,
        channel: int,
        listener: int,
        cgroups: list[int],
        rlimits: tuple[tuple[int, int], ...],
    ) -> Zygote:
        self._launcher.close()
        os.close(self._own_pidfd)
        for fd in cgroups:
            os.write(fd, b"0")
            os.close(fd)
        kernel.setns(pidfd, _ALL_BUT_PIDS)
        os.close(pidfd)
        oom_fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        self._walls.limit()
        self._walls.drop_privileges(rlimits)
        for stream in (1, 2):
            os.dup2(0, stream)  # commands can make it fail, which must not fill the host's log
        ends = socket.socket(fileno=channel), socket.socket(fileno=listener)
        return Zygote(*ends, oom_fd)


def _reap() -> None:
    """A sandbox is not gone before its interpreter has been waited for."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _wake(number: int, frame: object) -> None:
    """A handler must exist for the wake-up descriptor to be written."""
