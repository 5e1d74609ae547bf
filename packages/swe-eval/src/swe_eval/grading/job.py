"""The files that a grading run uploads, and the reading of its sealed records."""

import functools
import importlib.resources
import marshal
import signal
import sys
from dataclasses import dataclass

from swe_eval.core.verdict import RunEnd, TestStatus
from swe_eval.grading.host import CommandResult
from swe_eval.grading.runner import DONE, NOT_THERE, SEAL_BYTES
from swe_eval.tasks.task import FileTree, TestGrader, TestRunner, TreeFile

# Compiling the runner would cost several milliseconds in each sandbox, so code compiled here goes
# along for interpreters of the same kind.
_BOOT = b"""\
import marshal, sys
folder = sys.argv[1]
try:
    with open(f"{folder}/runner.{sys.implementation.cache_tag}", "rb") as file:
        code = marshal.loads(file.read())
except OSError:
    with open(f"{folder}/runner.py", "rb") as file:
        code = compile(file.read(), "<runner>", "exec")
scope = {"__name__": "runner"}
exec(code, scope)
scope["main"](f"{folder}/job")
"""
BOOT_FILE = "boot.py"
REPORT_BYTES = 256 * 1024
"""Output of the command to keep; holds the records of `tasks.task.MAX_TESTS` tests."""

_RECORD_BYTES = SEAL_BYTES + 4
# A version that every interpreter from 3.4 on reads.
_MARSHAL_VERSION = 4
_UNSTARTED = {126, NOT_THERE}
_STATUSES = {
    ord("p"): TestStatus.PASSED,
    ord("f"): TestStatus.FAILED,
    ord("e"): TestStatus.ERROR,
    ord("s"): TestStatus.SKIPPED,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """What a run of the hidden tests came to."""

    end: RunEnd
    detail: str = ""
    statuses: dict[str, TestStatus]
    log: str = ""
    unstarted: bool = False
    """It looks as if there were no interpreter, or no pytest; tested code can feign it."""


def pack_job(grader: TestGrader, tests: tuple[str, ...], *, workdir: str) -> bytes:
    """What every run of these tests is told; the same for all attempts at a task."""
    code: dict[str, bytes] = {}
    if grader.runner is TestRunner.FUNCTIONS:
        for path, source in grader.files.items():
            try:
                compiled = compile(source, f"<{path}>", "exec", dont_inherit=True, optimize=0)
            except (SyntaxError, ValueError):
                continue  # the run reports it
            code[path] = marshal.dumps(compiled)
    job = {
        "workdir": workdir,
        "mode": grader.runner.value,
        "files": dict(grader.files),
        "code": {sys.implementation.cache_tag: code},
        "tests": list(tests),
        "cpu_s": grader.cpu_s,
    }
    return marshal.dumps(job, _MARSHAL_VERSION)


def job_files(packed: bytes, *, seal: bytes) -> FileTree:
    """The files of one run, for a folder of its own."""
    return {**_runner_files(), "job": TreeFile(seal + packed)}


@functools.cache
def _runner_files() -> dict[str, TreeFile]:
    source = importlib.resources.files("swe_eval.grading").joinpath("runner.py").read_bytes()
    # The name in angle brackets marks its frames as not the repository's.
    code = compile(source, "<runner>", "exec", dont_inherit=True, optimize=2)
    return {
        BOOT_FILE: TreeFile(_BOOT),
        "runner.py": TreeFile(source),
        f"runner.{sys.implementation.cache_tag}": TreeFile(marshal.dumps(code)),
    }


def read_report(result: CommandResult, tests: tuple[str, ...], *, seal: bytes) -> RunReport:
    """Reads the records, and how the process ended, which counts unless the last record came."""
    log = result.stderr.decode("utf-8", "replace")
    statuses: dict[str, TestStatus] = {}
    try:
        done = _read_records(result.stdout, tests, seal, statuses)
    except ValueError as error:
        return RunReport(end=RunEnd.TAMPERED, detail=str(error), statuses={}, log=log)
    end, detail = (RunEnd.FINISHED, "") if done else _why_unfinished(result)
    unstarted = end is RunEnd.ABORTED and not statuses and result.exit_code in _UNSTARTED
    return RunReport(end=end, detail=detail, statuses=statuses, log=log, unstarted=unstarted)


def _read_records(
    stdout: bytes, tests: tuple[str, ...], seal: bytes, statuses: dict[str, TestStatus]
) -> bool:
    """Returns whether the last record came; raises ValueError for what the runner never writes."""
    done = False
    for start in range(0, len(stdout), _RECORD_BYTES):
        record = stdout[start : start + _RECORD_BYTES]
        if len(record) != _RECORD_BYTES or record[:SEAL_BYTES] != seal or done:
            raise ValueError("a record without the seal, or after the last one")
        index = int.from_bytes(record[SEAL_BYTES:-1], "big")
        if index == DONE:
            done = True
        elif index >= len(tests) or tests[index] in statuses or record[-1] not in _STATUSES:
            raise ValueError("an impossible or second result of a test")
        else:
            statuses[tests[index]] = _STATUSES[record[-1]]
    return done


def _why_unfinished(result: CommandResult) -> tuple[RunEnd, str]:
    if result.timed_out:
        return RunEnd.TIMEOUT, "the wall clock ran out"
    if result.exit_code == 128 + signal.SIGXCPU:
        return RunEnd.TIMEOUT, "the processor time ran out"
    # The kernel kills with signal 9 when memory runs out. So may the tested code itself: either way
    # the reference decides whether the limits are to blame.
    if result.out_of_memory or result.exit_code == 128 + signal.SIGKILL:
        return RunEnd.OUT_OF_MEMORY, "the process was killed"
    return RunEnd.ABORTED, f"exit code {result.exit_code} before the tests were done"
