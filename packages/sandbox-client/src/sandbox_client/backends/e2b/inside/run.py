# ruff: noqa: PTH123, PTH208, S606 -- for any Python from 3.7 on, with as few imports as can be
"""Runs one command: bounds its output, feeds its input, ends its whole tree when its time is over.

Started by `python3 -c CODE REQUEST`, the request being base64 of JSON. Lines out: `o` and `e` with
output, then one `x` with the result. Lines in: `i` with input, `c` closes it, `k` kills.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import pwd
import select
import signal
import sys
import time
from typing import Any, Callable, NoReturn  # noqa: UP035 -- as above

_READ_BYTES = 65536
_BACKLOG_BYTES = 262144
_PIPE_BYTES = 1048576
_KILL_ROUNDS = 100
_DYING_S = 2.0
_MARK = "TAILRACE_COMMAND"


class Stream:
    """One of the command's outputs: head and tail kept, the rest counted."""

    def __init__(self, letter: str, fd: int, bound: int | None) -> None:
        self.letter = letter
        self.fd = fd
        self.dropped = 0
        self._whole = bound is None
        self._head_left = ((bound or 0) + 1) // 2
        self._tail_budget = (bound or 0) // 2
        self._tail = bytearray()

    def feed(self, data: bytes, emit: Callable[[str, bytes], None]) -> None:
        """Takes the next bytes; emits those of the head."""
        head = data if self._whole else data[: self._head_left]
        self._head_left -= len(head)
        if head:
            emit(self.letter, head)
        self._tail += data[len(head) :]
        surplus = len(self._tail) - self._tail_budget
        if surplus > self._tail_budget + 4096:
            del self._tail[:surplus]
            self.dropped += surplus

    def finish(self, emit: Callable[[str, bytes], None]) -> None:
        """Emits the tail."""
        surplus = max(0, len(self._tail) - self._tail_budget)
        self.dropped += surplus
        if len(self._tail) > surplus:
            emit(self.letter, bytes(self._tail[surplus:]))


class Supervisor:
    """The command's parent."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self._out = bytearray()
        self._lines = b""
        self._input = bytearray()
        self._input_fd = -1
        self._closing = False
        self._control = True
        self._overdue = False
        self._killed = False
        self._status: int | None = None
        self._cpu_s = 0.0
        self._streams: list[Stream] = []
        self._wake = os.pipe()
        for fd in (*self._wake, 1):
            os.set_blocking(fd, False)
        self._oom_before = _oom_kills()

    def start(self) -> None:
        """Starts the command."""
        request = self._request
        _become_subreaper()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake[1])
        outputs = [("o", os.pipe())]
        if not request["merge_stderr"]:
            outputs.append(("e", os.pipe()))
        source = os.pipe() if request["stdin"] else (os.open(os.devnull, os.O_RDONLY), -1)
        self._began = time.monotonic()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _be_command(request, (source[0], outputs[0][1][1], outputs[-1][1][1]))
            finally:
                os._exit(126)
        os.close(source[0])
        self._input_fd = source[1]
        if self._input_fd >= 0:
            os.set_blocking(self._input_fd, False)
        for letter, (reading, writing) in outputs:
            os.close(writing)
            os.set_blocking(reading, False)
            self._streams.append(Stream(letter, reading, request["bound"]))

    def serve(self) -> None:
        """Works until the command has ended, and tells how."""
        end = self._began + self._request["timeout_s"]
        while self._status is None:
            self._turn(None if self._overdue else max(0.0, end - time.monotonic()))
            if time.monotonic() >= end and self._status is None and not self._overdue:
                self._overdue = True
                self._kill()
        wall_s = time.monotonic() - self._began
        for stream in self._streams:
            self._read(stream, _PIPE_BYTES)
        self._leave_reader()
        for stream in self._streams:
            stream.finish(self._emit)
        self._report(self._status, wall_s)
        os.set_blocking(1, True)
        while self._out:
            self._write_out()

    def _turn(self, wait_s: float | None) -> None:
        actions: dict[int, Callable[[], object]] = {}
        poll = select.poll()

        def watch(fd: int, event: int, act: Callable[[], object]) -> None:
            poll.register(fd, event)
            actions[fd] = act

        watch(self._wake[0], select.POLLIN, lambda: os.read(self._wake[0], 4096))
        if self._control and len(self._input) < _BACKLOG_BYTES:
            watch(0, select.POLLIN, self._take_control)
        if self._out:
            watch(1, select.POLLOUT, self._write_out)
        if self._input_fd >= 0 and self._input:
            watch(self._input_fd, select.POLLOUT, self._write_input)
        # A bounded output is drained whoever listens; a whole one waits for its reader.
        if self._request["bound"] is not None or len(self._out) < _BACKLOG_BYTES:
            for stream in self._streams:
                if stream.fd >= 0:
                    watch(stream.fd, select.POLLIN, self._reading(stream))
        for fd, _ in poll.poll(None if wait_s is None else int(wait_s * 1000) + 1):
            actions[fd]()
        self._reap()

    def _reading(self, stream: Stream) -> Callable[[], object]:
        return lambda: self._read(stream, _READ_BYTES)

    # -- processes

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                self._status = status
                self._cpu_s = usage.ru_utime + usage.ru_stime

    def _kill(self) -> None:
        """Ends the command and all that it started, however it tried to leave the tree."""
        self._killed = True
        killed: set[tuple[int, bytes]] = set()
        rounds, end = 0, time.monotonic() + _DYING_S
        empty = False
        while rounds < _KILL_ROUNDS:
            found = _tree(self._request["mark"])
            # Who loses its parent while they are listed is in nobody's tree: hence a second look.
            if not found and not empty:
                empty = True
                continue
            empty = not found
            # Who is killed may still be there for a while, but forks no more.
            fresh = found - killed
            if not found or (not fresh and time.monotonic() > end):
                return
            # The command before its children: a shell that outlives them ends by itself.
            for pid, _ in sorted(fresh, key=lambda victim: victim[0] != self._pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            killed |= fresh
            rounds += bool(fresh)
            self._reap()
            time.sleep(0.001)
        self._kill_all()

    def _kill_all(self) -> None:
        """Ends every process of the user's: what forks too fast for the rest cannot outrun it."""
        if os.geteuid() != 0:
            os.kill(-1, signal.SIGKILL)
        elif self._request["user"] and os.fork() == 0:
            try:
                _become(self._request["user"], {})
                os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)

    # -- bytes

    def _emit(self, letter: str, data: bytes) -> None:
        self._out += letter.encode() + b" " + base64.b64encode(data) + b"\n"

    def _write_out(self) -> None:
        with contextlib.suppress(BlockingIOError):
            del self._out[: os.write(1, self._out[:_READ_BYTES])]

    def _read(self, stream: Stream, most: int) -> None:
        while most > 0 and stream.fd >= 0:
            try:
                data = os.read(stream.fd, min(most, _READ_BYTES))
            except BlockingIOError:
                return
            if not data:
                os.close(stream.fd)
                stream.fd = -1
                return
            most -= len(data)
            stream.feed(data, self._emit)

    def _take_control(self) -> None:
        data = os.read(0, _READ_BYTES)
        if not data:
            self._control = False
            return
        *whole, self._lines = (self._lines + data).split(b"\n")
        for line in whole:
            if line == b"k":
                self._kill()
            elif line == b"c":
                self._closing = True
            elif line.startswith(b"i "):
                self._input += base64.b64decode(line[2:])
        self._write_input()

    def _write_input(self) -> None:
        try:
            while self._input_fd >= 0 and self._input:
                del self._input[: os.write(self._input_fd, self._input[:_READ_BYTES])]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._closing = True
            self._input.clear()
        if self._closing and self._input_fd >= 0:
            os.close(self._input_fd)
            self._input_fd = -1
        if self._input_fd < 0:
            self._input.clear()

    def _leave_reader(self) -> None:
        """Leaves a reader behind for background processes: without one they would be killed."""
        held = [stream.fd for stream in self._streams if stream.fd >= 0]
        if not held or self._killed or os.fork() != 0:
            return
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            for fd in held:
                os.set_blocking(fd, True)
            # Two at most: the one that ends first may hold the other up only if that is full.
            poll = select.poll()
            for fd in held:
                poll.register(fd, select.POLLIN)
            while held:
                for fd, _ in poll.poll():
                    if not os.read(fd, _READ_BYTES):
                        poll.unregister(fd)
                        held.remove(fd)
        finally:
            os._exit(0)

    def _report(self, status: int, wall_s: float) -> None:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        code = 128 + number if number else os.WEXITSTATUS(status)
        result = {
            "exit_code": code,
            "signal": number,
            # It may have ended by itself just before it was killed.
            "timed_out": self._overdue and number == signal.SIGKILL,
            "out_of_memory": code == 137 and not self._killed and _oom_kills() > self._oom_before,
            "wall_s": wall_s,
            "cpu_s": self._cpu_s,
            "omitted": {stream.letter: stream.dropped for stream in self._streams},
        }
        self._out += b"x " + json.dumps(result).encode() + b"\n"


def _be_command(request: dict[str, Any], fds: tuple[int, int, int]) -> NoReturn:
    """In the forked process: becomes the command."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for to, fd in enumerate(fds):
        os.dup2(fd, to)
    os.closerange(3, 4096)
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    # If memory runs out, the command goes first and not its supervisor.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")
    environ = dict(os.environ)
    if request["user"]:
        _become(request["user"], environ)
    environ.update(request["env"])
    environ[_MARK] = request["mark"]
    try:
        os.chdir(request["cwd"])
    except OSError as error:
        _fail(f"cannot enter {request['cwd']}: {error.strerror}", 126)
    environ["PWD"] = request["cwd"]
    argv = request["argv"] or ["/bin/sh", "-c", request["shell"]]
    try:
        os.execvpe(argv[0], argv, environ)
    except FileNotFoundError:
        _fail(f"{argv[0]}: not found", 127)
    except OSError as error:
        _fail(f"{argv[0]}: {error.strerror}", 126)


def _become(name: str, environ: dict[str, str]) -> None:
    """Takes a user's identity, if this is not that user already."""
    try:
        entry = pwd.getpwuid(int(name)) if name.isdigit() else pwd.getpwnam(name)
    except KeyError:
        _fail(f"there is no user {name}", 126)
    if os.geteuid() != entry.pw_uid:
        os.initgroups(entry.pw_name, entry.pw_gid)
        os.setgid(entry.pw_gid)
        os.setuid(entry.pw_uid)
        environ.update(HOME=entry.pw_dir, USER=entry.pw_name, LOGNAME=entry.pw_name)


def _fail(text: str, code: int) -> NoReturn:
    os.write(2, f"{text}\n".encode(errors="surrogateescape"))
    os._exit(code)


def _tree(mark: str) -> set[tuple[int, bytes]]:
    """This process's living descendants, and whoever carries the command's mark.

    Each with its time of start, which tells a reused pid from the earlier one.
    """
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _file(f"/proc/{name}/stat").rpartition(b")")[2].split()
            if fields and fields[0] not in (b"Z", b"X"):
                parents[int(name), fields[19]] = int(fields[1])
    found: set[tuple[int, bytes]] = set()
    grew = {os.getpid()}
    while grew:
        new = {process for process, parent in parents.items() if parent in grew} - found
        found |= new
        grew = {pid for pid, _ in new}
    marked = f"{_MARK}={mark}\0".encode()
    found |= {process for process in parents if marked in _file(f"/proc/{process[0]}/environ")}
    return {process for process in found if process[0] != os.getpid()}


def _file(path: str) -> bytes:
    """A file's content; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _become_subreaper() -> None:
    """Lets the command's orphans become this process's children, so that they are found."""
    # Without it their mark still finds them, unless they have cleared their environment.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def _oom_kills() -> int:
    for line in _file("/proc/vmstat").splitlines():
        if line.startswith(b"oom_kill "):
            return int(line.split()[1])
    return 0


if __name__ == "__main__":
    _supervisor = Supervisor(json.loads(base64.b64decode(sys.argv[1]).decode()))
    _supervisor.start()
    _supervisor.serve()
