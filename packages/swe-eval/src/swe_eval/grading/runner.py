"""Runs a grader's tests inside a sandbox. Uploaded there: it imports the standard library only.

Two processes. The child runs the tests and the code under test. The parent imports neither, and
forks the child before it reads the job, so the token that signs its report was never in the child's
memory. The child reports each test over a pipe under a seal; a record without it ends the run as
tampered. The report is one line on standard output, `<token> <report>`; what the tested code prints
goes to the report's log.

The job is one file: two marshalled values in a row. The first is the parent's: {"token", "tests"
(how many), "wall_s", "cpu_s", "log_bytes"}. The second, as bytes, is the child's: {"workdir",
"mode": "functions" | "pytest", "files": {path: source}, "tests": [id], "cpu_s"}, where an id is
`path::test_name` (`path::Class::name` with pytest). The report is a Python literal:
{"end", "detail", "statuses", "cpu_s", "log"}. `end` is finished, aborted, killed, timeout or
tampered; `statuses` has a letter for each test in order: p(assed) f(ailed) e(rror) s(kipped), or -
for missing.

Everything here is chosen to be cheap, for it runs once for every attempt: few imports, marshal
instead of JSON, and a parent that sleeps until the child is over.
"""

from __future__ import annotations

import marshal
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from types import CodeType
    from typing import Any, NoReturn

    Job = dict[str, Any]
    Limits = dict[str, Any]
    Reporter = Callable[[int, bytes], None]

SEAL_BYTES = 16
RECORD_BYTES = 24  # seal 16, index 4, letter 1, zeros 3
PIPE_BYTES = 4096  # the least that a pipe holds
DONE = 0xFFFFFFFF
LETTERS = b"pfes"
MISSING = b"-"


def main(job_path: str) -> NoReturn:
    """Forks the child, reads and removes the job, watches, prints the report."""
    job_in, job_out = os.pipe()
    result_in, result_out = os.pipe()
    log_in, log_out = os.pipe()
    child = os.fork()
    if child == 0:
        for fd in (job_out, result_in, log_in):
            os.close(fd)
        _run_child(job_in, result_out, log_out)
    for fd in (job_in, result_out, log_out):
        os.close(fd)
    with open(job_path, "rb") as file:  # noqa: PTH123 -- pathlib costs more than a small suite
        limits: Limits = marshal.load(file)  # noqa: S302 -- written by the grader
        job: bytes = marshal.load(file)  # noqa: S302
    # From here on nothing on disk tells the tested code what is asked of it.
    os.unlink(job_path)  # noqa: PTH108
    seal = os.urandom(SEAL_BYTES)
    _send_all(job_out, seal + job)
    os.close(job_out)
    report = _Watch(child, seal, limits).until_end(result_in, log_in)
    sys.stdout.write(f"\n{limits['token']} {report!r}\n")
    sys.stdout.flush()
    # Without the interpreter's own clearing up, which costs more than all of the above.
    os._exit(0)


def _send_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BrokenPipeError:
            return


# -- the parent ------------------------------------------------------------------------------------


class _Watch:
    """Collects a child's records and log until it ends or its time is up."""

    def __init__(self, child: int, seal: bytes, limits: Limits) -> None:
        self.child = child
        self.seal = seal
        self.limits = limits
        self.records = b""
        self.log = b""

    def until_end(self, result_in: int, log_in: int) -> dict[str, Any]:
        """Ends the child's whole process group and returns the report."""
        timed_out = self.collect(result_in, log_in)
        try:
            os.killpg(self.child, signal.SIGKILL)
        except OSError:  # not its own group's leader yet, or gone
            os.kill(self.child, signal.SIGKILL)
        _, status, usage = os.wait4(self.child, 0)
        self.records += _drain(result_in)
        self._keep_log(_drain(log_in))
        count = self.limits["tests"]
        end, detail, statuses = _read_records(self.records, self.seal, count)
        if end == "aborted":
            end, detail = self._why_aborted(status, timed_out)
        return {
            "end": end,
            "detail": detail,
            "statuses": statuses,
            "cpu_s": round(usage.ru_utime + usage.ru_stime, 4),
            "log": self.log.decode("utf-8", "replace"),
        }

    def collect(self, result_in: int, log_in: int) -> bool:
        """Returns True when the wall clock ran out first."""
        deadline = time.monotonic() + self.limits["wall_s"]
        most_bytes = RECORD_BYTES * (self.limits["tests"] + 1)
        exited = _open_pidfd(self.child)
        watched = [log_in] + ([] if exited is None else [exited])
        if most_bytes > PIPE_BYTES:
            # Else the pipe holds all records until the end, and this process may sleep.
            watched.append(result_in)
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return True
            wait_s = left_s if exited is not None else min(left_s, 0.02)
            ready = select.select(watched, [], [], wait_s)[0]
            for fd in ready:
                if fd == exited:
                    continue
                data = os.read(fd, 65536)
                if not data:
                    watched.remove(fd)
                elif fd == result_in:
                    self.records += data
                else:
                    self._keep_log(data)
            if _has_exited(self.child, exited, ready) or len(self.records) > most_bytes:
                return False

    def _keep_log(self, data: bytes) -> None:
        self.log = (self.log + data)[-self.limits["log_bytes"] :]

    def _why_aborted(self, status: int, timed_out: bool) -> tuple[str, str]:
        if timed_out:
            return "timeout", f"wall clock, {self.limits['wall_s']:g} s"
        if not os.WIFSIGNALED(status):
            return "aborted", f"exit code {os.WEXITSTATUS(status)} before the tests were done"
        if os.WTERMSIG(status) == signal.SIGXCPU:
            return "timeout", f"processor time, {self.limits['cpu_s']} s"
        return "killed", f"signal {os.WTERMSIG(status)}"


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # an old or an emulated kernel: poll instead
        return None


def _has_exited(pid: int, pidfd: int | None, ready: Collection[int]) -> bool:
    if pidfd is not None:
        return pidfd in ready
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _drain(fd: int) -> bytes:
    """What is in the pipe now; whoever else still holds its other end is not waited for."""
    os.set_blocking(fd, False)
    data = b""
    while len(data) < 1 << 20:
        try:
            piece = os.read(fd, 65536)
        except BlockingIOError:
            break
        if not piece:
            break
        data += piece
    return data


def _read_records(records: bytes, seal: bytes, count: int) -> tuple[str, str, str]:
    """Returns end, detail and one letter a test."""
    letters = bytearray(MISSING * count)
    done = False
    for start in range(0, len(records), RECORD_BYTES):
        record = records[start : start + RECORD_BYTES]
        index = int.from_bytes(record[16:20], "big")
        if len(record) != RECORD_BYTES or record[:SEAL_BYTES] != seal or done:
            return "tampered", "a record without the seal, or after the last", "-" * count
        if index == DONE:
            done = True
        elif index >= count or letters[index] != MISSING[0] or record[20] not in LETTERS:
            return "tampered", "an impossible or second result of a test", "-" * count
        else:
            letters[index] = record[20]
    return "finished" if done else "aborted", "", letters.decode()


# -- the child -------------------------------------------------------------------------------------


def _run_child(job_in: int, result_out: int, log_out: int) -> NoReturn:
    # The tested code may replace any of these.
    exit_now, flush = os._exit, _make_flush()
    os.setsid()
    data = b""
    while piece := os.read(job_in, 1 << 20):
        data += piece
    os.close(job_in)
    job: Job = marshal.loads(data[SEAL_BYTES:])  # noqa: S302
    report = _make_reporter(result_out, data[:SEAL_BYTES])
    del data
    complete = False
    try:
        _take_streams(log_out)
        _limit_processor(job["cpu_s"])
        if job["mode"] == "pytest":
            os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
            # Before the work folder comes first on the path.
            import pytest

            _become_a_plain_interpreter(job["workdir"])
            complete = _run_pytest(job, report, pytest)
        else:
            _become_a_plain_interpreter(job["workdir"])
            complete = _run_functions(job, report)
    except BaseException as error:
        _say("the tests did not run to their end", error)
    flush()
    if complete:
        report(DONE, b"p")
    # Exit handlers and threads of the tested code get no say.
    exit_now(0 if complete else 1)


def _take_streams(log_out: int) -> None:
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log_out, 1)
    os.dup2(log_out, 2)
    os.close(log_out)
    os.close(null)


def _limit_processor(cpu_s: int) -> None:
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _become_a_plain_interpreter(workdir: str) -> None:
    sys.dont_write_bytecode = True
    os.environ.pop("PYTEST_ADDOPTS", None)
    sys.modules["__main__"] = type(sys)("__main__")
    sys.argv = ["grade"]
    os.chdir(workdir)
    sys.path[0] = workdir


def _make_reporter(fd: int, seal: bytes) -> Reporter:
    write = os.write

    def report(index: int, letter: bytes) -> None:
        write(fd, seal + index.to_bytes(4, "big") + letter + b"\0\0\0")

    return report


def _make_flush() -> Callable[[], None]:
    streams = (sys.stdout, sys.stderr)

    def flush() -> None:
        for stream in streams:
            try:  # noqa: SIM105 -- contextlib costs an import
                stream.flush()
            except (OSError, ValueError):
                pass

    return flush


def _say(what: str, error: BaseException) -> None:
    """Logs one line: the error and its place in the repository, never a line of a hidden test."""
    place = ""
    trace = error.__traceback__
    while trace is not None:
        file_name = trace.tb_frame.f_code.co_filename
        if not file_name.startswith("<"):
            place = f" ({file_name}:{trace.tb_lineno})"
        trace = trace.tb_next
    try:
        text = str(error)[:500]
    except BaseException:
        text = "no text"
    sys.stderr.write(f"{what}: {type(error).__name__}: {text}{place}\n")


def _run_functions(job: Job, report: Reporter) -> bool:
    """Runs plain `def test_x():` functions, compiled before the repository is imported."""
    wanted: dict[str, list[tuple[int, str]]] = {}
    for index, test in enumerate(job["tests"]):
        path, _, name = test.partition("::")
        wanted.setdefault(path, []).append((index, name))
    compiled = {
        path: compile(job["files"][path], f"<{path}>", "exec", dont_inherit=True)
        for path in wanted
        if path in job["files"]
    }
    for path, code in compiled.items():
        _run_file(job["workdir"], path, code, wanted[path], report)
    return True


def _run_file(
    workdir: str, path: str, code: CodeType, tests: list[tuple[int, str]], report: Reporter
) -> None:
    stop_tracing, stop_profiling = sys.settrace, sys.setprofile
    bodies = {c.co_name: c for c in code.co_consts if isinstance(c, type(code))}
    folder, _, file_name = path.rpartition("/")
    module = type(sys)(file_name.removesuffix(".py"))
    module.__file__ = os.path.join(workdir, path)  # noqa: PTH118
    sys.modules[module.__name__] = module
    if folder:
        sys.path.insert(1, os.path.join(workdir, folder))  # noqa: PTH118
    try:
        exec(code, module.__dict__)  # noqa: S102 -- running tests is what this file is for
    except BaseException as error:
        _say(path, error)
        for index, _ in tests:
            report(index, b"e")
        return
    functions = [(index, name, module.__dict__.get(name)) for index, name in tests]
    for index, name, function in functions:
        stop_tracing(None)
        stop_profiling(None)
        body = bodies.get(name)
        # A function that was swapped, or given another body, is not the test: it stays missing.
        if body is not None and getattr(function, "__code__", None) is body:
            report(index, _run_test(f"{path}::{name}", function))


def _run_test(name: str, function: Any) -> bytes:
    try:
        # A coroutine or a generator has not tested anything yet.
        return b"p" if function() is None else b"e"
    except AssertionError as error:
        _say(name, error)
        return b"f"
    except BaseException as error:
        _say(name, error)
        return b"s" if type(error).__name__ in {"SkipTest", "Skipped"} else b"e"


def _run_pytest(job: Job, report: Reporter, pytest: Any) -> bool:
    """Runs pytest in this process with a plug-in of ours as the only one beside its own."""
    for path, source in job["files"].items():
        _place_file(job["workdir"], path, source)
    waiting = {test: index for index, test in enumerate(job["tests"])}
    worst: dict[str, bytes] = {}

    class Results:
        def pytest_runtest_logreport(self, report: Any) -> None:
            name = report.nodeid
            worst[name] = max(worst.get(name, b"p"), _letter_of(report), key=b"psfe".index)
            if report.when == "teardown" and name in waiting:
                send(waiting.pop(name), worst[name])

    send = report
    paths = list(dict.fromkeys(test.partition("::")[0] for test in job["tests"]))
    options = ["-q", "--tb=line", "--color=no", "-p", "no:cacheprovider"]
    code = pytest.main([*options, "--rootdir", job["workdir"], *paths], plugins=[Results()])
    # 0: all passed, 1: some failed. After anything else the tests did not run to their end.
    return int(code) in {0, 1}


def _letter_of(report: Any) -> bytes:
    if report.outcome == "passed" or hasattr(report, "wasxfail"):
        return b"p"
    if report.outcome == "skipped":
        return b"s"
    return b"f" if report.when == "call" else b"e"


def _place_file(workdir: str, path: str, source: str) -> None:
    """Writes a test file; a link or file that stands in its way is removed, never followed."""
    *folders, name = path.split("/")
    at = workdir
    for folder in folders:
        at = os.path.join(at, folder)  # noqa: PTH118
        if os.path.islink(at) or os.path.isfile(at):  # noqa: PTH113, PTH114
            os.unlink(at)  # noqa: PTH108
        if not os.path.isdir(at):  # noqa: PTH112
            os.mkdir(at)  # noqa: PTH102
    target = os.path.join(at, name)  # noqa: PTH118
    if os.path.lexists(target):
        os.unlink(target)  # noqa: PTH108
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(target, flags, 0o644), "w", encoding="utf-8") as file:
        file.write(source)
