"""One run of a task's grader inside a sandbox that already holds the work to be judged."""

import asyncio
import json
import math
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from service_kit.errors import Reason, ServiceError

from swe_eval.core.verdict import Judgement, RunEnd, TestStatus, Verdict, judge, judge_reward
from swe_eval.grading.controls import Control, make_control, make_line_control
from swe_eval.grading.host import CommandResult, SandboxHost
from swe_eval.grading.job import (
    BOOT_FILE,
    REPORT_BYTES,
    job_files,
    pack_job,
    read_report,
)
from swe_eval.grading.log_run import LOG_FILE, MAX_LOG_BYTES, RUN_LOGGED, judge_log, with_nonce
from swe_eval.grading.runner import SEAL_BYTES
from swe_eval.tasks.task import (
    FileTree,
    Grader,
    LogGrader,
    Reference,
    ScriptGrader,
    Task,
    TestGrader,
    TreeFile,
)

_REWARD_BYTES = 4096
_KEPT_JOBS = 256
_SEED_BYTES = 16
_LOGGED_SCRIPT = "eval.sh"
_READ_S = 30.0
# $0 is the script.
_RUN_SCRIPT = 'mkdir -p /logs/verifier /logs/agent /logs/artifacts && exec "$0"'
_NO_RUNNER = re.compile(
    r"No module named '?pytest\b|\b(pytest|python3?): (command )?not found|"
    r"'?(pytest|python3?)'?: No such file"
)
_READ_REWARD = "cd /logs/verifier && { cat reward.json 2>/dev/null || cat reward.txt; }"


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """A judgement and what was seen on the way to it."""

    judgement: Judgement
    detail: str
    log_tail: str
    unstarted: bool = False
    """It looks as if the sandbox lacked what the tests are run with (`RunReport.unstarted`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """How to run graders.

    Attributes:
        host: The sandbox service.
        python: Interpreter inside the sandbox.
        log_bytes: How much of the tests' output to keep.
        new_secret: Makes secrets of so many bytes.
    """

    host: SandboxHost
    python: str
    log_bytes: int
    new_secret: Callable[[int], bytes] = secrets.token_bytes
    _jobs: OrderedDict[tuple[str, int], tuple[TestGrader, bytes]] = field(
        default_factory=OrderedDict, repr=False
    )

    async def run(
        self, task: Task, sandbox_id: str, *, required: tuple[str, ...] | None = None
    ) -> Observation:
        """Runs the task's grader. `required` narrows the tests of all but a `ScriptGrader`."""
        return await self._run(task, task.grader, required, sandbox_id)

    def control_of(self, task: Task, *, blind: Collection[str]) -> Control | None:
        """Draws an altered form of the task's tests; None where there can't be one."""
        seed = int.from_bytes(self.new_secret(_SEED_BYTES), "big")
        grader = task.grader
        if isinstance(grader, TestGrader):
            return make_control(
                grader.files, grader.fail_to_pass, grader.pass_to_pass, seed=seed, blind=blind
            )
        if isinstance(grader, LogGrader):
            return make_line_control({_LOGGED_SCRIPT: grader.script}, seed=seed)
        sources = {
            path: file.content.decode("utf-8", "surrogateescape")
            for path, file in grader.files.items()
            if path.endswith(".py")
        }
        return make_line_control(sources, seed=seed)

    async def run_altered(self, task: Task, control: Control, sandbox_id: str) -> Observation:
        """Runs altered tests as `run` does the real ones."""
        return await self._run(task, _altered(task.grader, control), None, sandbox_id)

    async def _run(
        self, task: Task, grader: Grader, required: tuple[str, ...] | None, sandbox_id: str
    ) -> Observation:
        tests: tuple[str, ...] = ()
        if not isinstance(grader, ScriptGrader):
            tests = grader.required if required is None else required
        try:
            if isinstance(grader, TestGrader):
                packed = self._packed(task, grader, tests)
                return await self._run_tests(grader, tests, packed, sandbox_id)
            if isinstance(grader, LogGrader):
                return await self._run_logged(grader, tests, sandbox_id)
            return await self._run_script(task, grader, sandbox_id)
        except ServiceError as error:
            if error.reason is not Reason.TOO_LARGE:
                raise
            # The tests found no room: whose doing that is, a run of the reference shows.
            end = RunEnd.OUT_OF_DISK
            full = judge(required=tests, statuses={}, end=end) if tests else None
            return Observation(
                judgement=full or judge_reward(None, end=end), detail=error.message, log_tail=""
            )

    async def solve(self, task: Task, reference: Reference, sandbox_id: str) -> None:
        """Puts the reference solution into a pristine sandbox."""
        if reference.patch:
            await self.host.apply_patch(sandbox_id, reference.patch)
        elif reference.files:
            await self._run_from(
                task,
                "/solution",
                "solve.sh",
                reference.files,
                reference.env,
                task.grader.wall_s,
                sandbox_id,
            )

    async def _run_tests(
        self, grader: TestGrader, tests: tuple[str, ...], packed: bytes, sandbox_id: str
    ) -> Observation:
        seal = self.new_secret(SEAL_BYTES)
        folder = f"/tmp/{self.new_secret(8).hex()}"  # noqa: S108 -- inside the sandbox
        files = job_files(packed, seal=seal)
        await self.host.write_files(sandbox_id, folder, files)
        result = await self.host.run(
            sandbox_id,
            [self.python, f"{folder}/{BOOT_FILE}", folder],
            env={},
            timeout_s=grader.wall_s,
            max_output_bytes=REPORT_BYTES,
        )
        report = read_report(result, tests, seal=seal)
        return Observation(
            judgement=judge(required=tests, statuses=report.statuses, end=report.end),
            detail=report.detail,
            log_tail=report.log[-self.log_bytes :],
            unstarted=report.unstarted,
        )

    async def _run_logged(
        self, grader: LogGrader, tests: tuple[str, ...], sandbox_id: str
    ) -> Observation:
        nonce = self.new_secret(8).hex()
        folder = f"/tmp/{self.new_secret(8).hex()}"  # noqa: S108 -- inside the sandbox
        script = TreeFile(with_nonce(grader.script, nonce).encode())
        await self.host.write_files(sandbox_id, folder, {_LOGGED_SCRIPT: script})
        result = await self.host.run(
            sandbox_id,
            ["/bin/bash", "-c", RUN_LOGGED, folder],
            env={},
            timeout_s=grader.wall_s,
            max_output_bytes=self.log_bytes,
        )
        log = await self._read(sandbox_id, f"{folder}/{LOG_FILE}")
        # In a thread, for a log can be long.
        judgement, detail = await asyncio.to_thread(
            judge_log, log, parser=grader.parser, required=tests, nonce=nonce, end=_end_of(result)
        )
        return Observation(
            judgement=judgement,
            detail=detail,
            log_tail=log[-self.log_bytes :],
            unstarted=_lacks_runner(judgement, log),
        )

    async def _read(self, sandbox_id: str, path: str) -> str:
        """A file's text, in parts that fit into a command's bounded output."""
        parts: list[bytes] = []
        for start in range(1, MAX_LOG_BYTES, REPORT_BYTES):
            result = await self.host.run(
                sandbox_id,
                ["/bin/sh", "-c", f'tail -c +{start} "$0" | head -c {REPORT_BYTES}', path],
                env={},
                timeout_s=_READ_S,
                max_output_bytes=REPORT_BYTES,
            )
            parts.append(result.stdout)
            if len(result.stdout) < REPORT_BYTES:
                break
        return b"".join(parts).decode("utf-8", "replace")

    def _packed(self, task: Task, grader: TestGrader, tests: tuple[str, ...]) -> bytes:
        if grader is not task.grader:  # altered tests, which no other run has
            return pack_job(grader, tests, workdir=task.environment.workdir)
        key = (task.task_id, len(tests))
        known = self._jobs.get(key)
        if known is None or known[0] is not grader:
            packed = pack_job(grader, tests, workdir=task.environment.workdir)
            known = self._jobs[key] = (grader, packed)
            if len(self._jobs) > _KEPT_JOBS:
                self._jobs.popitem(last=False)
        return known[1]

    async def _run_script(self, task: Task, grader: ScriptGrader, sandbox_id: str) -> Observation:
        result = await self._run_from(
            task, "/tests", "test.sh", grader.files, grader.env, grader.wall_s, sandbox_id
        )
        end = _end_of(result)
        reward = await self._reward(sandbox_id) if end is RunEnd.FINISHED else None
        log = (result.stdout + result.stderr)[-self.log_bytes :].decode("utf-8", "replace")
        judgement = judge_reward(reward, end=end)
        return Observation(
            judgement=judgement,
            detail=f"test.sh ended with exit code {result.exit_code}, reward {reward}",
            log_tail=log,
            unstarted=_lacks_runner(judgement, log),
        )

    async def _reward(self, sandbox_id: str) -> float | None:
        result = await self.host.run(
            sandbox_id,
            ["/bin/sh", "-c", _READ_REWARD],
            env={},
            timeout_s=_READ_S,
            max_output_bytes=_REWARD_BYTES,
        )
        return parse_reward(result.stdout)

    async def _run_from(
        self,
        task: Task,
        folder: str,
        script: str,
        files: FileTree,
        env: Mapping[str, str],
        wall_s: float,
        sandbox_id: str,
    ) -> CommandResult:
        executable = {**files, script: TreeFile(files[script].content, executable=True)}
        await self.host.write_files(sandbox_id, folder, executable)
        return await self.host.run(
            sandbox_id,
            ["/bin/sh", "-c", _RUN_SCRIPT, f"{folder}/{script}"],
            env=env,
            timeout_s=wall_s,
            max_output_bytes=2 * self.log_bytes,
        )


def _lacks_runner(seen: Judgement, log: str) -> bool:
    """Whether nothing passed, and a script says that it has nothing to run tests with."""
    passed = seen.verdict is Verdict.SOLVED or any(
        test.status is TestStatus.PASSED for test in seen.tests
    )
    return not passed and _NO_RUNNER.search(log) is not None


def _altered(grader: Grader, control: Control) -> Grader:
    if isinstance(grader, TestGrader):
        return replace(grader, files=control.files)
    if isinstance(grader, LogGrader):
        return replace(grader, script=control.files[_LOGGED_SCRIPT])
    changed = {
        path: replace(grader.files[path], content=text.encode("utf-8", "surrogateescape"))
        for path, text in control.files.items()
    }
    return replace(grader, files={**grader.files, **changed})


def _end_of(result: CommandResult) -> RunEnd:
    if result.timed_out:
        return RunEnd.TIMEOUT
    return RunEnd.OUT_OF_MEMORY if result.out_of_memory else RunEnd.FINISHED


def parse_reward(text: bytes) -> float | None:
    """The reward that a Harbor verifier left, from its file's text.

    A JSON object counts by its `reward`, else by the least of its values. None when there is no
    finite number.
    """
    try:
        values = json.loads(text)
    except ValueError:
        return None
    if isinstance(values, dict):
        numbers = [values["reward"]] if "reward" in values else list(values.values())
    else:
        numbers = [values]
    if not numbers or any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
        return None
    least = float(min(numbers))
    return least if math.isfinite(least) else None
