"""Runs a repository's tests many times over, each time in a fork of a process that has pytest.

Uploaded into a sandbox: it imports the standard library, pytest and (from a folder beside it)
coverage. `python warm.py JOB RESULTS` reads a job in JSON and writes a line of JSON for each of
its runs as soon as that has ended, so that what was done is known even if this process dies.

A run's tests see the repository as the grader's do: same options, same working directory, no
plug-ins. Whatever a run leaves behind is undone: its processes are killed, also those that left
its group (this process adopts them), the repository's folder and those
for temporary files put back as they were (`workspace`).
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import importlib
import inspect
import json
import os
import resource
import signal
import sys
import time
import traceback
from typing import Any

Job = dict[str, Any]
Run = dict[str, Any]

PR_SET_CHILD_SUBREAPER = 36
LOG_BYTES = 4000
MAX_DESCRIBED = 6
_TESTS_RAN = {0, 1}


def main(job_path: str, results_path: str) -> None:
    """Does all runs of a job."""
    with open(job_path, encoding="utf-8") as file:  # noqa: PTH123
        job: Job = json.load(file)
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    os.environ.pop("PYTEST_ADDOPTS", None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    sys.path[0] = here
    witness = importlib.import_module("witness")
    folders = importlib.import_module("workspace")
    # The repository may have modules of these names.
    del sys.modules["witness"], sys.modules["workspace"]
    _preload_pytest()
    outside = [os.path.expanduser(path) for path in job["outside"]]  # noqa: PTH111
    work = folders.Workspace(job["workdir"], outside, keep=here)
    if job.get("compile"):
        _compile(job["workdir"])
    with open(results_path, "w", encoding="utf-8") as results:  # noqa: PTH123
        for run in job["runs"]:
            limited = {**job, **run.get("limits", {}), "witness": witness}
            result = _do(limited, run, folders, work, here)
            results.write(json.dumps(result) + "\n")
            results.flush()
            if run.get("stop") and result["end"] != "finished":
                return


def _preload_pytest() -> None:
    config = importlib.import_module("_pytest.config")
    for name in (*config.default_plugins, "assertion.rewrite"):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"_pytest.{name}")


def _compile(workdir: str) -> None:
    """Compiles all sources, valid by their content: a file with a bug in is never mistaken."""
    import compileall
    import py_compile

    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(workdir, quiet=2, invalidation_mode=mode)


def _do(job: Job, run: Run, folders: Any, work: Any, here: str) -> dict[str, Any]:
    """One entry of a job: the chosen tests first, until one fails, then all."""

    def attempt(first: bool) -> dict[str, Any]:
        try:
            if run.get("path"):
                work.put(run["path"], run["source"])
            folders.remove(os.path.join(here, "scratch"))  # noqa: PTH118
            return {**_fork(job, {**run, "first": first}, here), "id": run["id"]}
        finally:
            work.restore()

    if run.get("targets"):
        found = attempt(True)
        if found["end"] != "finished":
            return found
        if not found["failed"]:
            return {"id": run["id"], "end": "unnoticed"}
    return attempt(False)


def _fork(job: Job, run: Run, here: str) -> dict[str, Any]:
    """Runs the tests in a child of its own, within limits."""
    scratch = os.path.join(here, "scratch")  # noqa: PTH118
    os.makedirs(scratch)  # noqa: PTH103
    answer = os.path.join(scratch, "answer")  # noqa: PTH118
    log = os.path.join(scratch, "log")  # noqa: PTH118
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _child(job, run, here, scratch)
    ended = _wait(pid, began + job["wall_s"])
    _kill_all(pid)
    said = {"log": _tail(log), "wall_s": time.monotonic() - began}
    if ended is None:
        return {"end": "timeout", **said}
    status, cpu_s = ended
    said["cpu_s"] = cpu_s
    if os.WIFSIGNALED(status):
        overdue = os.WTERMSIG(status) == signal.SIGXCPU or cpu_s >= job["cpu_s"]
        return {"end": "timeout" if overdue else "died", **said}
    try:
        with open(answer, encoding="utf-8") as file:  # noqa: PTH123
            return {**json.load(file), **said}
    except (OSError, ValueError):
        return {"end": "died", **said}


def _wait(pid: int, deadline: float) -> tuple[int, float] | None:
    """Exit status and processor seconds; None if time was up first."""
    pause = 0.002
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return status, usage.ru_utime + usage.ru_stime
        if time.monotonic() > deadline:
            return None
        time.sleep(pause)
        pause = min(pause * 1.5, 0.03)


def _kill_all(group: int) -> None:
    """Ends every process that a run has started."""
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)
    while True:
        for child in _children():
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    own, found = os.getpid(), []
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    parent = int(file.read().rpartition(b") ")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            if parent == own:
                found.append(int(name))
    return found


def _tail(path: str) -> str:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            file.seek(max(0, os.path.getsize(path) - LOG_BYTES))  # noqa: PTH202
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _child(job: Job, run: Run, here: str, scratch: str) -> None:
    """Never returns."""
    code = 1
    try:
        os.setsid()
        log = os.open(os.path.join(scratch, "log"), os.O_WRONLY | os.O_CREAT, 0o600)  # noqa: PTH118
        null = os.open(os.devnull, os.O_RDONLY)
        for fd, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(fd, target)
        cpu_s = max(1, round(job["cpu_s"]))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_bytes"], job["file_bytes"]))
        resource.setrlimit(resource.RLIMIT_AS, (job["memory_bytes"], job["memory_bytes"]))
        os.environ["TMPDIR"] = os.path.join(scratch, "tmp")  # noqa: PTH118
        os.makedirs(os.environ["TMPDIR"])  # noqa: PTH103
        answer = _run_tests(job, run, here)
        os.umask(0o077)  # a test may have left one that shuts out its owner
        partial = os.path.join(scratch, "partial")  # noqa: PTH118
        with open(partial, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump(answer, file)
        os.rename(partial, os.path.join(scratch, "answer"))  # noqa: PTH104, PTH118
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run_tests(job: Job, run: Run, here: str) -> dict[str, Any]:
    import pytest

    cover = _Coverage(job, here) if run.get("cover") else None
    sys.dont_write_bytecode = not run.get("keep_bytecode")
    sys.modules["__main__"] = type(sys)("__main__")
    sys.argv = ["grade"]
    os.chdir(job["workdir"])
    sys.path[0] = job["workdir"]
    watch = _Watch(job, run, cover)
    # Whatever the repository says, all tests are run.
    options = ["-q", "--tb=short", "--color=no", "-p", "no:cacheprovider", "--maxfail=0"]
    paths = job["paths"]
    if run.get("first"):
        options.append("-x")
        paths = list(dict.fromkeys(test.partition("::")[0] for test in run["targets"]))
    if run.get("collect"):
        options.append("--collect-only")
    code = int(pytest.main([*options, "--rootdir", job["workdir"], *paths], plugins=[watch]))
    answer = watch.answer()
    answer["end"] = "finished" if code in _TESTS_RAN else "broken"
    answer["exit_code"] = code
    if cover is not None:
        answer["cover"] = cover.spans(job["spans"])
    return answer


class _Watch:
    """The plug-in that sees how every test ends."""

    def __init__(self, job: Job, run: Run, cover: _Coverage | None) -> None:
        self._job, self._run, self._cover = job, run, cover
        self._targets = frozenset(run["targets"]) if run.get("first") else None
        self._required = frozenset(job["required"])
        self._worst: dict[str, str] = {}
        self._ended: list[str] = []
        self._described: list[dict[str, Any]] = []
        self._defined: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self._targets is not None:
            items[:] = [item for item in items if item.nodeid in self._targets]
        if self._run.get("reverse"):
            items.reverse()
        if self._run.get("list"):
            for item in items:
                with contextlib.suppress(Exception):
                    self._look_where_defined(item)

    def _look_where_defined(self, item: Any) -> None:
        function = inspect.unwrap(item.function)
        place = os.path.realpath(function.__code__.co_filename)
        path = os.path.relpath(place, os.path.realpath(self._job["workdir"]))
        if path != item.nodeid.partition("::")[0]:
            self._defined[item.nodeid] = "::".join([path, *function.__qualname__.split(".")])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self._cover is not None:
            self._cover.enter(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self._cover is not None:
            self._cover.enter("")

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        wanted = self._run.get("describe", ())
        if not wanted or call.when == "teardown" or call.excinfo is None:
            return
        # All that are required, or those of a list.
        asked = self._required if wanted is True else wanted
        if item.nodeid in asked and len(self._described) < MAX_DESCRIBED:
            witness = self._job["witness"]
            name = getattr(item, "originalname", None) or item.name
            # A fixture has another name: it is the first of the repository's functions.
            below = f"{self._job['workdir']}/" if call.when == "setup" else ""
            said = witness.describe(call.excinfo.value, name, below)
            self._described.append({"test": item.nodeid, **said})

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid
        letter = _letter_of(report)
        self._worst[name] = max(self._worst.get(name, "p"), letter, key="psfe".index)
        if report.when == "teardown":
            self._ended.append(name)

    def answer(self) -> dict[str, Any]:
        if self._run.get("list"):
            # An id that two tests share names neither.
            times = collections.Counter(self._ended)
            tests = {name: self._worst[name] if n == 1 else "e" for name, n in times.items()}
            return {"tests": tests, "defined": self._defined}
        if self._targets is not None:
            return {"failed": sum(letter in "fe" for letter in self._worst.values())}
        ended = set(self._ended)
        letters = (self._worst[n] if n in ended else "-" for n in self._job["required"])
        return {"letters": "".join(letters), "described": self._described}


def _letter_of(report: Any) -> str:
    # As the grader's runner.
    if report.outcome == "passed" or hasattr(report, "wasxfail"):
        return "p"
    if report.outcome == "skipped":
        return "s"
    return "f" if report.when == "call" else "e"


class _Coverage:
    """Which lines each test executes."""

    def __init__(self, job: Job, here: str) -> None:
        folder = os.path.join(here, "lib")  # noqa: PTH118
        sys.path.append(folder)
        coverage = importlib.import_module("coverage")
        self._cover = coverage.Coverage(
            data_file=None, config_file=False, include=[f"{job['workdir']}/*"], messages=False
        )
        self._workdir = job["workdir"]
        self._tests: dict[str, int] = {}
        self._cover.start()
        sys.path.remove(folder)

    def enter(self, test: str) -> None:
        number = self._tests.setdefault(test, len(self._tests)) if test else ""
        self._cover.switch_context(str(number))

    def spans(self, spans: dict[str, list[list[int]]]) -> dict[str, Any]:
        """The tests, and of each span of lines the numbers of those that reach it."""
        self._cover.stop()
        data = self._cover.get_data()
        reached = {}
        for path, ranges in spans.items():
            lines = data.contexts_by_lineno(os.path.join(self._workdir, path))  # noqa: PTH118
            reached[path] = [
                sorted({int(c) for n in range(a, b + 1) for c in lines.get(n, ()) if c})
                for a, b in ranges
            ]
        return {"tests": list(self._tests), "reached": reached}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
