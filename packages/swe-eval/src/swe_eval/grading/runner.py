"""Runs a grader's tests inside a sandbox. Uploaded there: it imports the standard library only.

Before anything of the repository runs, it reads and removes its job, keeps the command's standard
output for itself and gives the tested code standard error in its place. Results go out as records
under a seal that came with the job, and the last record says that all tests have been run: what the
tested code prints or writes to stray descriptors is no record, and a process that ends early has
sent no last one. Whoever started this process never imports tested code; how it ended counts too.

The job: the seal, then marshalled {"workdir", "mode": "functions" | "pytest", "files": {path:
source}, "code": {cache tag: {path: marshalled code}}, "tests": [id], "cpu_s"}, where an id is
`path::test_name` (`path::Class::name` with pytest). A record is the seal, the index of the test and
a letter: p(assed) f(ailed) e(rror) s(kipped).

Everything here is chosen to be cheap, for it runs once for every attempt: few imports, marshal
instead of JSON, one write for a short suite.
"""

from __future__ import annotations

import marshal
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType
    from typing import Any, NoReturn

    Job = dict[str, Any]

SEAL_BYTES = 8
NOT_THERE = 127
"""Exit code where pytest is not to be had, as a shell has it of a command."""
DONE = 0xFFFFFF
_FLUSH_S = 0.1


def main(job_path: str) -> NoReturn:
    """Runs the job and ends the process."""
    with open(job_path, "rb") as file:  # noqa: PTH123 -- pathlib costs more than a small suite
        seal = file.read(SEAL_BYTES)
        job: Job = marshal.load(file)  # noqa: S302 -- written by the grader
    # From here on nothing on disk tells the tested code what is asked of it.
    os.unlink(job_path)  # noqa: PTH108
    records = Records(os.dup(1), seal)
    os.dup2(2, 1)
    # The tested code may replace any of these.
    exit_now, flush_streams = os._exit, _make_flush()
    complete, failed = False, 1
    try:
        _limit_processor(job["cpu_s"])
        if job["mode"] == "pytest":
            complete = _run_pytest(job, records)
        else:
            _become_a_plain_interpreter(job["workdir"])
            complete = _run_functions(job, records)
    except BaseException as error:
        _say("the tests did not run to their end", error)
        if isinstance(error, NoPytestError):
            failed = NOT_THERE
    flush_streams()
    if complete:
        records.add(DONE, b"p")
    records.flush()
    # Exit handlers and threads of the tested code get no say, and the interpreter's own clearing up
    # would cost more than all of the above.
    exit_now(0 if complete else failed)


class NoPytestError(Exception):
    """This interpreter has none that can be imported."""


class Records:
    """Results on their way out; a process forked by the tested code can't add to them."""

    def __init__(self, fd: int, seal: bytes) -> None:
        # Bound now: the tested code may replace any of these.
        self._write, self._clock, self._pid_now, self._exit = (
            os.write,
            time.monotonic,
            os.getpid,
            os._exit,
        )
        self._fd = fd
        self._seal = seal
        self._pid = os.getpid()
        self._waiting = b""
        self._flushed_at = self._clock()

    def add(self, index: int, letter: bytes) -> None:
        """Takes one result; sends it soon."""
        if self._pid_now() != self._pid:
            self._exit(1)
        self._waiting += self._seal + index.to_bytes(3, "big") + letter
        if self._clock() - self._flushed_at > _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Sends what waits."""
        while self._waiting:
            self._waiting = self._waiting[self._write(self._fd, self._waiting) :]
        self._flushed_at = self._clock()


def _limit_processor(cpu_s: int) -> None:
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _become_a_plain_interpreter(workdir: str) -> None:
    sys.dont_write_bytecode = True
    sys.modules["__main__"] = type(sys)("__main__")
    sys.argv = ["grade"]
    os.chdir(workdir)
    sys.path[0] = workdir


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


def _run_functions(job: Job, records: Records) -> bool:
    """Runs plain `def test_x():` functions, compiled before the repository is imported."""
    wanted: dict[str, list[tuple[int, str]]] = {}
    for index, test in enumerate(job["tests"]):
        path, _, name = test.partition("::")
        wanted.setdefault(path, []).append((index, name))
    ready = job["code"].get(sys.implementation.cache_tag, {})
    compiled = {
        path: marshal.loads(ready[path])  # noqa: S302 -- written by the grader
        if path in ready
        else compile(job["files"][path], f"<{path}>", "exec", dont_inherit=True, optimize=0)
        for path in wanted
        if path in job["files"]
    }
    for path, code in compiled.items():
        _run_file(job["workdir"], path, code, wanted[path], records)
    return True


def _run_file(
    workdir: str, path: str, code: CodeType, tests: list[tuple[int, str]], records: Records
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
            records.add(index, b"e")
        return
    functions = [(index, name, module.__dict__.get(name)) for index, name in tests]
    for index, name, function in functions:
        stop_tracing(None)
        stop_profiling(None)
        body = bodies.get(name)
        # A function that was swapped, or given another body, is not the test: it stays missing.
        if body is not None and getattr(function, "__code__", None) is body:
            records.add(index, _run_test(f"{path}::{name}", function))


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


def _run_pytest(job: Job, records: Records) -> bool:
    """Runs pytest in this process with a plug-in of ours as the only one beside its own."""
    os.environ.pop("PYTEST_ADDOPTS", None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        import pytest  # before the work folder comes first on the path
    except ImportError as error:
        raise NoPytestError(str(error)) from error

    _become_a_plain_interpreter(job["workdir"])
    for path, source in job["files"].items():
        _place_file(job["workdir"], path, source)
    waiting = {test: index for index, test in enumerate(job["tests"])}
    worst: dict[str, bytes] = {}

    class Results:
        def pytest_runtest_logreport(self, report: Any) -> None:
            name = report.nodeid
            worst[name] = max(worst.get(name, b"p"), _letter_of(report), key=b"psfe".index)
            if report.when == "teardown" and name in waiting:
                records.add(waiting.pop(name), worst[name])

    paths = list(dict.fromkeys(test.partition("::")[0] for test in job["tests"]))
    # Whatever the repository says, all tests are run: of altered ones several have to fail.
    options = ["-q", "--tb=line", "--color=no", "-p", "no:cacheprovider", "--maxfail=0"]
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
