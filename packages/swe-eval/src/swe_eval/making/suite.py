"""A repository's test suite in sandboxes: what passes without a bug, and what fails with one."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox_client import (
    Command,
    EnvironmentRef,
    FileContent,
    Sandbox,
    SandboxClient,
    SandboxGone,
    SandboxLimits,
    WrongRequest,
)

from swe_eval.errors import RepositoryError
from swe_eval.generate.failure import Failure
from swe_eval.generate.plan import PASSED, RUN_ENDS, SuiteRun
from swe_eval.generate.repository_task import WORKDIR
from swe_eval.grading.prepare import is_protected
from swe_eval.making.source_tree import SourceTree, matches

logger = logging.getLogger(__name__)

MIB = 1024 * 1024
MEMORY_BYTES = 1024 * MIB
FILE_BYTES = 64 * MIB
_HERE = "/tmp/make"  # noqa: S108 -- inside the sandbox
_RESULT_BYTES = 64 * MIB
_UPLOAD_BYTES = 1024 * 1024
_START_S = 120.0
_SPARE_S = 30.0
_PROCESSOR_SLACK_S = 1.0
_SLOWER = 3.0
_WALL_FACTOR = 4.0

Job = dict[str, Any]
_COLLECTING = {"id": "collect", "collect": True, "keep_bytecode": True, "list": True}


@dataclass(frozen=True, kw_only=True)
class Examined:
    """One bug's run."""

    run: SuiteRun
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The suite without a bug."""

    required: tuple[str, ...]
    """Tests that passed in every run, in the order of the suite."""
    left_out: Mapping[str, int]
    """Other tests, by why: `failing`, `skipped`, `unsteady`, `not_graded`."""
    reached: Mapping[str, Mapping[tuple[int, int], tuple[str, ...]]]
    """By source file and span of lines the required tests that execute one of them."""
    cpu_s: float
    """Processor time of a run, the slowest."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Files of the required tests, in order."""
        return tuple(dict.fromkeys(test.partition("::")[0] for test in self.required))


class SuiteSandbox:
    """A sandbox with a repository in it whose suite can be run, over and over.

    Args:
        client: An open client.
        tree: The repository.
        env: Variables of every command.
    """

    def __init__(self, client: SandboxClient, tree: SourceTree, env: Mapping[str, str]) -> None:
        self._client = client
        self._tree = tree
        self._env = env
        self._sandbox: Sandbox | None = None
        self._jobs = 0

    async def close(self) -> None:
        """Ends the sandbox."""
        if self._sandbox is not None and not self._sandbox.gone:
            await self._sandbox.destroy()
        self._sandbox = None

    async def run(self, job: Job, *, seed: int) -> list[dict[str, Any]]:
        """The results of a job's runs; where the process died, those up to there.

        Args:
            job: As `warm` takes it.
            seed: Of Python's hashes.
        """
        for again in (True, False):
            try:
                return await self._run(job, seed)
            except SandboxGone:
                self._sandbox = None
                if not again:
                    raise
                logger.warning("a sandbox was lost; its work is done again in another")
        raise AssertionError("unreachable")

    async def _run(self, job: Job, seed: int) -> list[dict[str, Any]]:
        fresh = self._sandbox is None
        sandbox = self._sandbox = self._sandbox or await self._start()
        if "spans" in job:
            for files in _batches(_coverage_files()):
                await sandbox.write_files(files)
        if fresh:
            # Compiles everything once, the tests as pytest rewrites them too.
            job = {**job, "compile": True, "runs": [_COLLECTING, *job["runs"]]}
        results = await self._run_in(sandbox, job, seed)
        return results[1:] if fresh else results

    async def _start(self) -> Sandbox:
        tree = self._tree.environment_tree
        await self._client.put_environment(tree)
        sandbox = await self._client.create(
            EnvironmentRef(tree_digest=tree.digest, workdir=WORKDIR, env=self._env),
            limits=SandboxLimits(memory_bytes=MEMORY_BYTES),
            labels={"purpose": "making tasks"},
            timeout_s=_START_S,
        )
        package = importlib.resources.files("swe_eval.making")
        await sandbox.write_files(
            [
                FileContent(f"{_HERE}/{name}", package.joinpath(name).read_bytes())
                for name in ("warm.py", "witness.py")
            ]
        )
        return sandbox

    async def _run_in(self, sandbox: Sandbox, job: Job, seed: int) -> list[dict[str, Any]]:
        self._jobs += 1
        results_path = f"{_HERE}/results-{self._jobs}"
        data = json.dumps(job).encode()
        await sandbox.write_files([FileContent(f"{_HERE}/job.json", data)])
        runs = len(job["runs"])
        done = await sandbox.run(
            Command(
                argv=("python3", f"{_HERE}/warm.py", f"{_HERE}/job.json", results_path),
                env={"PYTHONHASHSEED": str(seed)},
                # Each run may take its time twice: the chosen tests, then all.
                timeout_s=min(3600.0, 2 * runs * job["wall_s"] + _SPARE_S),
                max_output_bytes=4000,
            )
        )
        if b"No module named 'pytest'" in done.stderr_bytes or b"'_pytest'" in done.stderr_bytes:
            raise RepositoryError(
                "the sandboxes' Python has no pytest; give the sandbox service a folder that has "
                "it (local.site_packages), or name an environment with --python"
            )
        results = await self._read_results(sandbox, results_path)
        if len(results) < runs and not done.out_of_memory and not done.timed_out:
            logger.warning("a process of test runs ended early: %s", done.stderr[-1000:])
        return results

    @staticmethod
    async def _read_results(sandbox: Sandbox, path: str) -> list[dict[str, Any]]:
        try:
            text = await sandbox.read(path, max_bytes=_RESULT_BYTES)
        except WrongRequest:
            return []  # it never came to be
        lines = text.decode("utf-8", "replace").split("\n")[:-1]
        return [json.loads(line) for line in lines]


def _coverage_files() -> list[FileContent]:
    """The coverage library, which the sandboxes' Python need not have."""
    return [
        FileContent(f"{_HERE}/lib/{path.as_posix()}", Path(str(path.locate())).read_bytes())
        for path in importlib.metadata.files("coverage") or ()
        if path.parts[0] == "coverage" and path.suffix in {".py", ".so"}
    ]


def _batches(files: Iterable[FileContent]) -> Iterable[list[FileContent]]:
    batch: list[FileContent] = []
    for file in files:
        if batch and sum(len(f.content) for f in batch) + len(file.content) > _UPLOAD_BYTES:
            yield batch
            batch = []
        batch.append(file)
    yield batch


def _job(
    *,
    paths: Sequence[str],
    required: Sequence[str],
    cpu_s: float,
    runs: Sequence[Mapping[str, Any]],
) -> Job:
    return {
        "workdir": WORKDIR,
        "paths": list(paths),
        "required": list(required),
        "cpu_s": cpu_s,
        "wall_s": _WALL_FACTOR * cpu_s + _SPARE_S,
        "memory_bytes": int(MEMORY_BYTES * 0.9),
        "file_bytes": FILE_BYTES,
        "runs": list(runs),
    }


async def run_baseline(
    box: SuiteSandbox,
    tree: SourceTree,
    *,
    spans: Mapping[str, Sequence[tuple[int, int]]],
    exclude: Sequence[str],
    timeout_s: float,
) -> Baseline:
    """Runs the suite as it is: in order, in reverse with other hashes, and once for coverage.

    Raises:
        RepositoryError: there are no tests, they can't be run, none passes, or they take too long.
    """
    paths = sorted({_test_path(path) for path in tree.texts if _is_test(path)} - {""})
    paths = [path for path in paths if not matches(path, exclude)]
    if not paths:
        raise RepositoryError(f"{tree.name} has no tests (test_*.py or *_test.py)")
    job = _job(paths=paths, required=(), cpu_s=timeout_s, runs=())
    plain = {"id": "baseline", "list": True}
    ranges = {path: [list(span) for span in found] for path, found in spans.items()}
    runs = [plain, {**plain, "cover": True}]
    # With coverage it takes longer.
    slow = {"cpu_s": 3 * timeout_s, "wall_s": 3 * job["wall_s"], "spans": ranges}
    results = await box.run({**job, **slow, "runs": runs}, seed=0)
    in_order, covered = _finished(results, 0, timeout_s), _finished(results, 1, timeout_s)
    results = await box.run({**job, "runs": [{**plain, "reverse": True}]}, seed=1)
    reverse = _finished(results, 0, timeout_s)
    required, left_out = _steady(in_order["tests"], reverse["tests"], tree, exclude)
    if not required:
        raise RepositoryError(
            f"no test of {tree.name} passes ({_counted(left_out)}): {_last_line(in_order)}"
        )
    cpu_s = max(in_order["cpu_s"], reverse["cpu_s"])
    if cpu_s > timeout_s / 2:
        raise RepositoryError(
            f"the tests of {tree.name} take {cpu_s:.0f} s; at most half of --test-timeout "
            f"({timeout_s:.0f} s) leaves room for a slower machine; raise it, or --exclude the "
            "slow ones"
        )
    return Baseline(
        required=required,
        left_out=left_out,
        reached=_reached(covered["cover"], spans, frozenset(required)),
        cpu_s=cpu_s,
    )


def _finished(results: Sequence[Mapping[str, Any]], n: int, timeout_s: float) -> Mapping[str, Any]:
    found = results[n] if n < len(results) else {"end": "died", "log": ""}
    if found["end"] == "finished":
        return found
    if found["end"] == "timeout":
        raise RepositoryError(
            f"the tests take longer than {timeout_s:.0f} s; raise --test-timeout, or --exclude the "
            "slow ones"
        )
    raise RepositoryError(
        "pytest can't run the tests as they are "
        f"(here and in grading it runs without plug-ins): {_last_line(found)}; mend that, "
        "--exclude files that can't be collected, or name an environment that has what they need "
        "(--python)"
    )


def _last_line(found: Mapping[str, Any]) -> str:
    lines = [line.strip() for line in str(found.get("log", "")).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith(("E ", "ERROR", "error:"))]
    return " / ".join((telling or lines)[-3:])[-600:] or "no output"


def _is_test(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.startswith("test_") or name.endswith("_test.py")


def _test_path(path: str) -> str:
    # Arguments of pytest: neither an option nor an id.
    return "" if path.startswith("-") or "::" in path else path


def _steady(
    in_order: Mapping[str, str],
    reverse: Mapping[str, str],
    tree: SourceTree,
    exclude: Sequence[str],
) -> tuple[tuple[str, ...], dict[str, int]]:
    """The tests that both runs passed, and how many others there are, by why."""
    required: list[str] = []
    left_out = {"failing": 0, "skipped": 0, "unsteady": 0, "not_graded": 0}
    for test, letter in in_order.items():
        path = test.partition("::")[0]
        if path not in tree.texts or not is_protected(path) or matches(test, exclude):
            left_out["not_graded"] += 1
        elif reverse.get(test) != letter:
            left_out["unsteady"] += 1
        elif letter == PASSED:
            required.append(test)
        else:
            left_out["skipped" if letter == "s" else "failing"] += 1
    left_out["unsteady"] += len(reverse.keys() - in_order.keys())
    return tuple(required), left_out


def _counted(left_out: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {why}" for why, count in left_out.items() if count) or "none found"


def _reached(
    cover: Mapping[str, Any],
    spans: Mapping[str, Sequence[tuple[int, int]]],
    required: frozenset[str],
) -> dict[str, dict[tuple[int, int], tuple[str, ...]]]:
    tests = cover["tests"]
    return {
        path: {
            span: found
            for span, numbers in zip(spans[path], groups, strict=True)
            if (found := tuple(tests[n] for n in numbers if tests[n] in required))
        }
        for path, groups in cover["reached"].items()
    }


async def examine(
    box: SuiteSandbox,
    baseline: Baseline,
    bugs: Sequence[tuple[str, str, Sequence[str]]],
    *,
    timeout_s: float,
) -> list[tuple[Examined, ...]]:
    """Runs the suite with each of some bugs in place, and what is noticed a second time.

    Args:
        box: Where.
        baseline: The suite without a bug.
        bugs: Path, text of the file with the bug in, and the tests that reach it.
        timeout_s: Longest processor time of a run.

    Returns:
        For each bug its runs: one if it was not noticed or broke the suite, else two, the second
        in reverse order and with other hashes.
    """
    cpu_s = min(timeout_s, _SLOWER * baseline.cpu_s + _PROCESSOR_SLACK_S)
    job = _job(paths=baseline.paths, required=baseline.required, cpu_s=cpu_s, runs=())
    runs = {
        n: {"id": n, "path": path, "source": source, "targets": list(tests), "describe": True}
        for n, (path, source, tests) in enumerate(bugs)
    }
    first = await _examine_all(box, job, runs, seed=0)
    again = {
        n: {**run, "targets": [], "reverse": True, "describe": [f.test for f in first[n].failures]}
        for n, run in runs.items()
        if first[n].run.end == "finished"
    }
    second = await _examine_all(box, job, again, seed=1)
    return [(first[n], second[n]) if n in second else (first[n],) for n in runs]


async def _examine_all(
    box: SuiteSandbox, job: Job, runs: Mapping[int, Mapping[str, Any]], *, seed: int
) -> dict[int, Examined]:
    """Where one bug ends the whole process, the others are done without it."""
    found: dict[int, Examined] = {}
    while len(found) < len(runs):
        todo = [run for n, run in runs.items() if n not in found]
        results = await box.run({**job, "runs": todo}, seed=seed)
        for result in results:
            found[int(result["id"])] = _examined(result, len(job["required"]))
        if len(results) < len(todo):
            found[int(todo[len(results)]["id"])] = Examined(run=SuiteRun(end="died"))
    return found


def _examined(result: Mapping[str, Any], tests: int) -> Examined:
    # The tested code could have written anything: what is no result is none.
    end, letters = str(result["end"]), str(result.get("letters", ""))
    if end not in RUN_ENDS or (end == "finished" and len(letters) != tests):
        return Examined(run=SuiteRun(end="died"))
    return Examined(
        run=SuiteRun(end=end, letters=letters),
        failures=tuple(Failure.read(values) for values in result.get("described") or ()),
    )
