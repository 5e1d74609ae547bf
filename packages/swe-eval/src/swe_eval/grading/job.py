"""The files that a grading run uploads, and the reading of its signed report."""

import ast
import functools
import importlib.resources
import marshal
import sys
from dataclasses import dataclass
from typing import Any

from swe_eval.core.verdict import RunEnd, TestStatus
from swe_eval.grading.host import CommandResult
from swe_eval.tasks.task import FileTree, TestGrader, TreeFile

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

_STATUSES = {
    "p": TestStatus.PASSED,
    "f": TestStatus.FAILED,
    "e": TestStatus.ERROR,
    "s": TestStatus.SKIPPED,
    "-": TestStatus.MISSING,
}
_ENDS = {
    "finished": RunEnd.FINISHED,
    "aborted": RunEnd.ABORTED,
    "timeout": RunEnd.TIMEOUT,
    "tampered": RunEnd.TAMPERED,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """What a run of the hidden tests came to."""

    end: RunEnd
    detail: str = ""
    statuses: dict[str, TestStatus]
    cpu_s: float = 0.0
    log: str = ""


def job_files(
    grader: TestGrader, tests: tuple[str, ...], *, token: str, workdir: str, log_bytes: int
) -> FileTree:
    """The files of one run, for a folder that only this run knows."""
    limits = {
        "token": token,
        "tests": len(tests),
        "wall_s": grader.wall_s,
        "cpu_s": grader.cpu_s,
        "log_bytes": log_bytes,
    }
    job = {
        "workdir": workdir,
        "mode": grader.runner.value,
        "files": dict(grader.files),
        "tests": list(tests),
        "cpu_s": grader.cpu_s,
    }
    packed = _marshalled(limits) + _marshalled(_marshalled(job))
    return {**_runner_files(), "job": TreeFile(packed)}


def _marshalled(value: Any) -> bytes:
    # A version that every interpreter from 3.4 on reads.
    return marshal.dumps(value, 4)


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


def read_report(result: CommandResult, tests: tuple[str, ...], *, token: str) -> RunReport:
    """Finds the signed report in a command's output. Lines without the token are nobody's word."""
    for line in reversed(result.stdout.splitlines()):
        signature, _, body = line.partition(b" ")
        if signature == token.encode():
            report = ast.literal_eval(body.decode("utf-8", "replace"))
            return _from_body(report, tests, result.out_of_memory)
    log = result.stderr.decode("utf-8", "replace")
    if result.timed_out:
        end = RunEnd.TIMEOUT
    elif result.out_of_memory:
        end = RunEnd.OUT_OF_MEMORY
    else:
        end = RunEnd.NO_RESULT
    detail = f"the runner ended with exit code {result.exit_code} and without a report"
    return RunReport(end=end, detail=detail, statuses={}, log=log)


def _from_body(body: dict[str, object], tests: tuple[str, ...], out_of_memory: bool) -> RunReport:
    end = _ENDS.get(str(body["end"]), RunEnd.ABORTED)
    # The kernel kills with signal 9 when memory runs out; so may the tested code itself. Either way
    # the reference decides whether the limits are to blame.
    if body["end"] == "killed" and (out_of_memory or body["detail"] == "signal 9"):
        end = RunEnd.OUT_OF_MEMORY
    letters = str(body["statuses"])
    return RunReport(
        end=end,
        detail=str(body["detail"]),
        statuses={
            name: _STATUSES[letter]
            for name, letter in zip(tests, letters, strict=True)
            if letter != "-"
        },
        cpu_s=float(str(body["cpu_s"])),
        log=str(body["log"]),
    )
