# ruff: noqa: PTH103 -- keeps the fork-server small: no pathlib
"""The fork-server: makes sandboxes on request, ends them on request, says when one has ended.

It holds root's capabilities in its own mount namespace, runs no foreign code and talks to the
service alone. It dies with the service; every sandbox dies with it.
"""

import os
import select
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress

from sandbox_client.backends.local.jail import kernel, wire
from sandbox_client.backends.local.jail.init import Init, PythonRun
from sandbox_client.backends.local.jail.messages import Create
from sandbox_client.backends.local.jail.rehearsal import rehearse
from sandbox_client.backends.local.jail.walls import Settings, Walls

__all__ = ["ForkServer"]

_REHEARSALS = 12
# Not at once: the sandbox that has just been asked for needs the processors now.
_SPARE_AFTER_MS = 2


class ForkServer:
    """The loop of the fork-server. `serve` returns only in a process that is to run Python code."""

    def __init__(self, control: socket.socket, settings: Settings) -> None:
        self._control = control
        self._settings = settings
        self._ids: dict[int, str] = {}
        self._spares: dict[int, socket.socket] = {}
        self._refill = settings.spares > 0
        self._own_pid_namespace = -1
        self._walls = Walls(settings)
        self._mount_points: set[str] = set()

    def prepare(self) -> None:
        """Does once what every sandbox inherits."""
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.unshare(kernel.CLONE_NEWUTS)
        kernel.set_hostname("sandbox")
        kernel.clear_inheritable_capabilities()
        kernel.drop_bounding_set()
        os.umask(0o022)
        rehearse(self._settings.python_path, dict(os.environ))
        kernel.mount("proc", "/proc", "proc")
        self._own_pid_namespace = _own_namespace("pid")
        self._walls.prepare()
        self._rehearse_setup()
        kernel.umount("/proc")

    def _rehearse_setup(self) -> None:
        """Sets sandboxes up without a process in them, for the reason that `rehearsal` gives."""
        own = [_own_namespace(kind) for kind in ("net", "ipc", "uts", "mnt")]
        lower = [f"{self._settings.rehearsal_digest}/tree"]
        asked = Create("rehearsal", "/workspace", (), 1 << 20, 256, lower, {})
        self._make_mount_points("/workspace")
        for _ in range(_REHEARSALS):
            self._walls.isolate()
            for fd in self._walls.mount(asked):
                os.close(fd)
            for fd in own:
                kernel.setns(fd)
        for fd in own:
            os.close(fd)

    def serve(self) -> PythonRun | None:
        """Works until the service goes away. Returns a program to run in a sandbox's process."""
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        wire.send(self._control, "serving")
        while True:
            init = None
            ready = dict(poll.poll(_SPARE_AFTER_MS if self._refill else None))
            if wake_read in ready:
                os.read(wake_read, 4096)
                self._reap()
            if self._control.fileno() in ready:
                received = wire.receive(self._control, max_fds=8)
                if received is None:
                    return None
                fields, fds = received
                if fields.text() == "create":
                    init = self._create(Create.read(fields), fds)
                else:
                    self._kill(fields.text())
            elif self._refill and not ready:
                self._refill = False
                with suppress(OSError):  # the next create will say why
                    init = self._make_spares()
            if init is not None:
                # In the child: the fork-server's own things end here.
                self._control.close()
                os.close(wake_read)
                os.close(wake_write)
                return init.serve()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            spare = self._spares.pop(pid, None)
            if spare is not None:
                spare.close()
            sandbox_id = self._ids.pop(pid, None)
            if sandbox_id is not None:
                wire.send(self._control, "exited", sandbox_id, status)

    def _kill(self, sandbox_id: str) -> None:
        for pid, known in self._ids.items():
            if known == sandbox_id:
                # Ours and not reaped yet, so the number cannot mean anyone else.
                os.kill(pid, signal.SIGKILL)

    def _create(self, asked: Create, fds: list[int]) -> Init | None:
        """Lets a waiting process become a sandbox; returns that, in a process forked for it."""
        self._refill = self._settings.spares > 0
        try:
            self._make_mount_points(asked.workdir)
            pid = self._give_to_spare(asked, fds)
            if not pid:
                init = self._make_spares(fds)
                if init is not None:
                    return init
                pid = self._give_to_spare(asked, fds)
            if pid:
                self._ids[pid] = asked.sandbox_id
            else:
                self._refuse(asked.sandbox_id, "the process for it was killed")
        except OSError as error:
            self._refuse(asked.sandbox_id, error.strerror or str(error))
        for fd in fds:
            os.close(fd)
        return None

    def _refuse(self, sandbox_id: str, why: str) -> None:
        wire.send(self._control, "failed", sandbox_id, f"fork: {why}")

    def _make_spares(self, not_theirs: Sequence[int] = ()) -> Init | None:
        """Forks processes that wait for what they are to become, as many as there should be.

        One right after the other: pages that this process writes to between two forks are copied,
        and each child keeps the old ones. In a child that has become a sandbox's first process it
        returns that; the descriptors in `not_theirs` are closed there.
        """
        for _ in range(max(1, self._settings.spares) - len(self._spares)):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                pid = self._fork()
            except OSError:
                ours.close()
                theirs.close()
                raise
            if pid == 0:
                for spare in (ours, *self._spares.values()):
                    spare.close()
                for fd in not_theirs:
                    os.close(fd)
                return self._wait_to_become(theirs)
            theirs.close()
            self._spares[pid] = ours
        return None

    def _fork(self) -> int:
        """Forks the first process of a new pid namespace."""
        kernel.unshare(kernel.CLONE_NEWPID)
        pid = -1
        try:
            pid = kernel.fork()
        finally:
            # In the child this would fail and is not needed: it is in its own namespace.
            if pid != 0:
                kernel.setns(self._own_pid_namespace)
        return pid

    def _wait_to_become(self, fork_server: socket.socket) -> Init:
        """In a spare: does what is the same for all, then waits for what is not."""
        problem: OSError | None = None
        try:
            self._walls.isolate()
        except OSError as error:
            problem = error
        with fork_server:
            received = wire.receive(fork_server, max_fds=8)
        if received is None:
            os._exit(0)
        fields, fds = received
        fields.text()
        return self._become_init(Create.read(fields), fds, problem)

    def _give_to_spare(self, asked: Create, fds: list[int]) -> int:
        """Lets a waiting process become this sandbox; its pid, or 0 if none is there."""
        while self._spares:
            pid = next(iter(self._spares))
            with self._spares.pop(pid) as spare:
                try:
                    wire.send(spare, *asked.fields(), fds=fds)
                except OSError:
                    continue  # it has ended, and will be reaped
                return pid
        return 0

    def _make_mount_points(self, workdir: str) -> None:
        """The root's file system is shared, so a folder is made once for all sandboxes."""
        for target in (workdir, *self._settings.mounts):
            if target not in self._mount_points:
                os.makedirs(target, mode=0o755, exist_ok=True)
                self._mount_points.add(target)

    def _become_init(self, asked: Create, fds: list[int], problem: OSError | None) -> Init:
        """Makes this isolated process the first one of a sandbox; `problem` is why it is not."""
        channel = socket.socket(fileno=fds[0])
        step = "isolate"
        try:
            _raise(problem)
            step = "join cgroups"
            for fd in fds[1:]:
                os.write(fd, b"0")
                os.close(fd)
            step = "mount"
            mounted = self._walls.mount(asked)
            # As root and without limits still: what a user has under way is counted for all
            # sandboxes together.
            wire.send(channel, "mounted", fds=mounted)
            for fd in mounted:
                os.close(fd)
            oom_fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
            step = "drop privileges"
            os.close(self._own_pid_namespace)
            self._walls.limit()
            self._walls.drop_privileges(asked.rlimits)
            init = Init(channel, self._settings.python_path, oom_fd)
            init.listen()
            wire.send(channel, "ready")
        except BaseException as error:  # the parent only sees an exit status
            wire.send(channel, "failed", step, str(error) or repr(error))
            os._exit(1)
        return init


def _own_namespace(kind: str) -> int:
    return os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)


def _raise(problem: OSError | None) -> None:
    if problem is not None:
        raise problem


def _ignore(number: int, frame: object) -> None:
    """A handler must exist for the wake-up descriptor to be written."""
