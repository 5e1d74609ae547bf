"""Starting the processes of commands from a process that goes on: what they inherit of it."""

import _signal  # type: ignore[import-not-found]
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

from sandbox_client.backends.local.jail import kernel

__all__ = ["Forking", "kill", "leave"]

_RESET_SIGNALS = (signal.SIGINT, signal.SIGPIPE, signal.SIGCHLD, signal.SIGXFSZ)
# The kernel ends processes with the highest score first when memory runs out; the process that
# starts the others must not be the one.
_COMMAND_OOM_SCORE = 500


class Forking:
    """Starts processes that the kernel would rather end than this one."""

    def __init__(self, oom_fd: int) -> None:
        self._oom_fd = oom_fd
        # Lowering it below what it was takes a right that an ordinary user's service lacks.
        self._own_score = max(0, int(os.pread(oom_fd, 16, 0) or 0))

    def fork(self) -> int:
        """Forks this process."""
        self._set_score(_COMMAND_OOM_SCORE)
        pid = -1
        try:
            pid = kernel.fork()
        finally:
            if pid != 0:
                self._set_score(self._own_score)
        return pid

    def spawn(
        self, path: str, argv: list[str], environ: Mapping[str, str], fds: Sequence[int]
    ) -> int:
        """Executes a program in a session of its own, with `fds` as its standard streams."""
        self._set_score(_COMMAND_OOM_SCORE)
        try:
            return os.posix_spawn(
                path,
                argv,
                environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, to) for to, fd in enumerate(fds)],
                setsid=True,
                setsigdef=_RESET_SIGNALS,
            )
        finally:
            self._set_score(self._own_score)

    def _set_score(self, score: int) -> None:
        os.pwrite(self._oom_fd, b"%d" % max(score, self._own_score), 0)


def leave(fds: Sequence[int]) -> None:
    """In a forked child: a session of its own, `fds` as standard streams, and no other."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    for to, fd in enumerate(fds):
        os.dup2(fd, to)
    os.closerange(3, 1 << 20)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Sends a signal to a process that may have ended meanwhile; nonsense is ignored."""
    with suppress(OSError, ValueError):
        os.kill(pid, number)
