# ruff: noqa: PTH112 -- keeps the fork-server small: no pathlib
"""The first process of a sandbox: starts commands, ends them, reaps, and runs Python warm.

It has no privileges of its own: it runs as the commands' user, without capabilities, under their
seccomp filter. Being pid 1, it cannot be killed from inside, and its memory is closed to the
commands. If the service's end of its channel closes, it exits, and the kernel ends the rest.
"""

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

from sandbox_client.backends.local.jail import wire
from sandbox_client.backends.local.jail.forking import Forking, kill
from sandbox_client.backends.local.jail.loop import ProgramLoop
from sandbox_client.backends.local.jail.messages import Exec
from sandbox_client.backends.local.jail.processes import in_killing_order, processes, tree_of
from sandbox_client.backends.local.jail.python_args import PythonRun, parse_python
from sandbox_client.backends.local.jail.shims import SHIM_PYTHONS

__all__ = ["Init", "PythonRun"]

_CANNOT_START = 126
_NOT_FOUND = 127
_MAX_KILL_ROUNDS = 100


@dataclass
class _Running:
    """One command: its root process and Python programs that its shells asked for."""

    number: int
    started: float
    root: int = 0
    warm: set[int] = field(default_factory=set)
    cpu_s: float = 0.0


class Init(ProgramLoop):
    """The loop of a sandbox's first process, until the service goes away."""

    def __init__(self, channel: socket.socket, python_path: str, oom_fd: int) -> None:
        super().__init__(channel, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._python_path = python_path
        self._forking = Forking(oom_fd)
        self._running: dict[int, _Running] = {}
        self._background: set[tuple[int, int]] = set()

    def listen(self) -> None:
        """Takes the address of the Python stand-in, before any command can."""
        self._shims.listen()

    # -- commands of the service

    def _from_channel(self) -> PythonRun | None:
        received = wire.receive(self._channel, max_fds=3)
        if received is None:
            os._exit(0)
        fields, fds = received
        if fields.text() == "exec":
            run = self._start(Exec.read(fields), fds)
            if run is not None:
                return run
            for fd in fds:
                os.close(fd)
        else:
            target = self._running.get(fields.number())
            if target is not None:
                self._kill_tree(target)
        return None

    def _start(self, asked: Exec, fds: list[int]) -> PythonRun | None:
        # The service is trusted to send what it should.
        argv, environ, cwd = list(asked.argv), dict(asked.environ), asked.cwd
        through_shell = asked.shell is not None and not argv
        if asked.shell is not None and not argv:
            argv = ["sh", "-c", asked.shell]
        running = _Running(asked.number, time.monotonic())
        try:
            os.chdir(cwd)
        except OSError as error:
            self._refuse(running, fds, f"cannot enter {cwd}: {error.strerror}", _CANNOT_START)
            return None
        try:
            path = "/bin/sh" if through_shell else _find_program(argv[0], environ.get("PATH", ""))
            if path in SHIM_PYTHONS:
                run = parse_python(argv, environ, cwd)
                if run is not None:
                    run.executable = path
                    return self._fork_python(running, run, fds)
                # By its own path: it finds its library by the name it is started under.
                path = self._python_path
                argv = [path, *argv[1:]]
            running.root = self._forking.spawn(path, argv, environ, fds)
        except OSError as error:
            if asked.shell is not None and not through_shell:
                # Only a shell gives a shell's own message, and runs a script without "#!".
                os.chdir("/")
                return self._start(replace(asked, argv=()), fds)
            code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _CANNOT_START
            self._refuse(running, fds, f"{argv[0]}: {error.strerror}", code)
            return None
        finally:
            os.chdir("/")
        self._running[asked.number] = running
        return None

    def _refuse(self, running: _Running, fds: list[int], text: str, code: int) -> None:
        """The command could not start: that is a result, as it would be from a shell."""
        # If nobody reads, the exit code says it too.
        with suppress(OSError):
            os.write(fds[2], f"{text}\n".encode(errors="surrogateescape"))
        self._report(running, code << 8)

    def _fork_python(self, running: _Running, run: PythonRun, fds: list[int]) -> PythonRun | None:
        """Forks; returns the program in the child and None in the parent."""
        pid = self._forking.fork()
        if pid == 0:
            self._leave(fds)
            return run
        running.root = pid
        self._running[running.number] = running
        return None

    def _report(self, running: _Running, status: int) -> None:
        wall_us = int((time.monotonic() - running.started) * 1e6)
        cpu_us = int(running.cpu_s * 1e6)
        wire.send(self._channel, "ended", running.number, status, wall_us, cpu_us)

    # -- endings

    def _reap(self) -> None:
        """Collects what has ended; a command ends with its root process."""
        ended = []
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                survivors = False
                break
            if pid == 0:
                survivors = True
                break
            spent = usage.ru_utime + usage.ru_stime
            self._shims.ended(pid, status)
            for running in self._running.values():
                if pid == running.root:
                    running.cpu_s += spent
                    ended.append((running, status))
                elif pid in running.warm:
                    running.cpu_s += spent
                    running.warm.discard(pid)
        for running, status in ended:
            del self._running[running.number]
            if survivors:
                self._note_background()
            self._report(running, status)
        if not survivors:
            self._background.clear()

    def _note_background(self) -> None:
        """Remembers what outlives a command, so that a later command's timeout spares it."""
        everyone = processes()
        owned = tree_of(self._roots(), everyone)
        self._background |= {(p.pid, p.started) for p in everyone if p.pid not in owned}

    def _roots(self, *, without: _Running | None = None) -> list[int]:
        return [
            pid
            for running in self._running.values()
            if running is not without
            for pid in (running.root, *running.warm)
        ]

    def _kill_tree(self, target: _Running) -> None:
        """Ends a command with everything it started, also what has left its process group."""
        if len(self._running) == 1 and not self._background:
            # One call, which no fork can outrun: the kernel holds its list of processes meanwhile.
            kill(-1)
            _await_ends({(p.pid, p.started) for p in processes()})
            return
        # What others own is spared. A process that has cut every tie while several commands ran is
        # nobody's and ends with the first that is killed.
        killed: set[tuple[int, int]] = set()
        for _ in range(_MAX_KILL_ROUNDS):
            everyone = processes()
            spared = tree_of(self._roots(without=target), everyone)
            spared |= tree_of(
                [p.pid for p in everyone if (p.pid, p.started) in self._background], everyone
            )
            # Who is killed may still be there for a while, but forks no more.
            victims = {(p.pid, p.started) for p in everyone if p.pid not in spared} - killed
            if not victims:
                _await_ends(killed)
                return
            for pid, _ in in_killing_order(victims, target.root):
                kill(pid)
            killed |= victims
        kill(-1)

    # -- stand-ins for `python` inside shell commands

    def _from_shim(self, fd: int) -> PythonRun | None:
        asked = self._shims.read(fd)
        if asked is None:
            return None
        owner = self._owner_of(asked.peer)
        try:
            pid = self._forking.fork()
        except OSError:
            self._shims.refuse(asked)
            return None
        if pid == 0:
            asked.tell_started()
            self._leave(asked.fds)
            return asked.run
        self._shims.started(asked, pid)
        if owner is not None:
            owner.warm.add(pid)
        return None

    def _owner_of(self, peer: int) -> _Running | None:
        """Which command's tree a process belongs to."""
        if len(self._running) == 1 and not self._background:
            return next(iter(self._running.values()))
        everyone = processes()
        for running in self._running.values():
            if peer in tree_of((running.root, *running.warm), everyone):
                return running
        return None


def _await_ends(killed: set[tuple[int, int]]) -> None:
    """Waits, a second at most, so that who gets the command's result finds none of them running."""
    for _ in range(_MAX_KILL_ROUNDS):
        if killed.isdisjoint({(p.pid, p.started) for p in processes()}):
            return
        time.sleep(0.01)


def _find_program(name: str, path: str) -> str:
    """The file that a shell would run.

    Raises:
        FileNotFoundError: there is none.
    """
    if "/" in name:
        return name
    for folder in path.split(":"):
        candidate = f"{folder or '.'}/{name}"
        if os.access(candidate, os.X_OK) and not os.path.isdir(candidate):
            return candidate
    raise FileNotFoundError(2, "not found")
