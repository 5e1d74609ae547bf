"""A sandbox in which a repository's test suite is run, over and over."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
import logging
from collections.abc import Iterable, Mapping
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
from swe_eval.generate.repository_task import WORKDIR
from swe_eval.making.source_tree import SourceTree

__all__ = ["MEMORY_BYTES", "MIB", "SPARE_S", "Job", "SuiteSandbox"]

logger = logging.getLogger(__name__)

MIB = 1024 * 1024
MEMORY_BYTES = 1024 * MIB
SPARE_S = 30.0
"""Time beside what a run's processor time explains."""
_HERE = "/tmp/make"  # noqa: S108 -- inside the sandbox
_RESULT_BYTES = 64 * MIB
_UPLOAD_BYTES = 1024 * 1024
_START_S = 120.0
_LONGEST_S = 3600.0
_COLLECTING = {"id": "collect", "collect": True, "keep_bytecode": True, "list": True}

Job = dict[str, Any]
"""As `warm` takes it."""


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
                for name in ("warm.py", "witness.py", "workspace.py")
            ]
        )
        return sandbox

    async def _run_in(self, sandbox: Sandbox, job: Job, seed: int) -> list[dict[str, Any]]:
        self._jobs += 1
        results_path = f"{_HERE}/results-{self._jobs}"
        data = json.dumps(job).encode()
        await sandbox.write_files([FileContent(f"{_HERE}/job.json", data)])
        runs = len(job["runs"])
        wall_s = max(run.get("limits", job)["wall_s"] for run in job["runs"])
        done = await sandbox.run(
            Command(
                argv=("python3", f"{_HERE}/warm.py", f"{_HERE}/job.json", results_path),
                env={"PYTHONHASHSEED": str(seed)},
                # Each run may take its time twice: the chosen tests, then all.
                timeout_s=min(_LONGEST_S, 2 * runs * wall_s + SPARE_S),
                max_output_bytes=4000,
            )
        )
        if b"No module named 'pytest'" in done.stderr_bytes or b"'_pytest'" in done.stderr_bytes:
            raise RepositoryError(
                "the sandboxes' Python has no pytest; give the sandbox service a folder that has "
                "it (local.site_packages), or name an environment with --python"
            )
        results = await self._read_results(sandbox, results_path)
        if done.exit_code and not done.out_of_memory and not done.timed_out:
            logger.warning("a process of test runs ended early: %s", done.stderr[-1000:])
        if done.exit_code or done.out_of_memory or done.timed_out:
            await self.close()  # nobody has put back what its last run left
        return results

    @staticmethod
    async def _read_results(sandbox: Sandbox, path: str) -> list[dict[str, Any]]:
        try:
            text = await sandbox.read(path, max_bytes=_RESULT_BYTES)
        except WrongRequest:
            return []  # it never came to be
        return results_in(text.decode("utf-8", "replace"))


def results_in(text: str) -> list[dict[str, Any]]:
    """The results up to the first line that is none: the tested code writes where it likes."""
    results = []
    for line in text.split("\n")[:-1]:
        try:
            result = json.loads(line)
        except ValueError:
            break
        if not isinstance(result, dict) or not {"id", "end"} <= result.keys():
            break
        results.append(result)
    return results


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
