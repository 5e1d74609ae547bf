"""Gradings a second: this package's grader, a plain subprocess with pytest, and `docker run`.

All get the same list of tasks and diffs, in turn, round by round, with as many at once, and have
to come to the same verdicts. The tasks are generated ones, each a small repository with 20 to 37
hidden tests; the diffs of each: the gold patch, one that changes nothing that counts, a wrong one
and one that breaks the module at import. (An empty diff needs no run with any of them: it is
compared, not timed.)

* `ours.*`: the grader over a sandbox service of its own, the whole path: a fresh sandbox, the diff
  filtered and applied, sealed results; and, but for `*_without_controls`, a second run with
  altered tests in another sandbox for each diff that passed. `functions` runs the tests by our own
  runner, as plain functions are; `pytest` runs the same ones by pytest, as those of public
  repositories are.
* `subprocess`: a copy of the repository, `git apply`, `python -m pytest -q -p no:cacheprovider`.
  No isolation, no limits; tested code that prints or exits as it likes is believed.
* `docker`: the same in `docker run --rm --network none`, of an image that holds Python, pytest and
  the repositories.

All have the same interpreter, pytest and byte code, and no plug-ins. `ratio_subprocess` and
`ratio_docker` are of `ours.functions`, with every protection; `pytest.ratio_*` of `ours.pytest`.
`*.cpu_ms` is the processor time of one grading, of all processes but docker's, and
`*cpu_ratio_subprocess` compares it: on a machine that does other work at the time it says more.

Usage: python tools/bench/grading.py [--rounds 5] [--tasks 4] [--at-once 2]   (as root)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sandbox_client import SandboxClient
from sandbox_client.backends.local.host import base_python
from sandbox_client.testing.dockerd import dockerd_missing, running_dockerd
from sandbox_client.testing.host_image import write_host_image
from sandbox_client.testing.packages import copy_pytest
from sandbox_client.testing.service import RunningService
from service_kit.channel import ChannelConfig
from swe_eval.config import GradingConfig
from swe_eval.core.verdict import Verdict
from swe_eval.generate import GeneratedTask, make_task
from swe_eval.generate.task import unified_patch
from swe_eval.grading.run import Grader
from swe_eval.grading.sandboxes import ServiceHost
from swe_eval.tasks.generated import from_generated
from swe_eval.tasks.task import Task, TestGrader, TestRunner

if __name__ == "__main__":  # run as a script: its neighbours come from tools/
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.sandbox_attempt import children_cpu_s, own_cpu_s, sandbox_makers, ticks

IMAGE = "grading:latest"
SPREAD_OF_TASKS = 7
"""Neighbours in the generator share a repository."""
OPTIONS = ("-q", "-p", "no:cacheprovider")
ENVIRON = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
# $1 is the task's folder, the rest the tests; the diff comes by standard input.
IN_CONTAINER = (
    'cd "/repositories/$1" && cp -r "/hidden/$1/." . && shift && git apply - '
    f'&& exec /opt/python/bin/python -m pytest {" ".join(OPTIONS)} "$@"'
)

Samples = dict[str, list[float]]
Verdicts = dict[str, bool]


@dataclass(frozen=True)
class Job:
    """One grading: a task and a diff for it."""

    name: str
    made: GeneratedTask
    diff: bytes

    @property
    def tests(self) -> list[str]:
        """The files of the hidden tests."""
        return list(self.made.hidden_tests)


def jobs_of(made: GeneratedTask) -> list[Job]:
    """The gold patch, and what an agent might hand in instead."""
    path = made.module
    broken = made.files[path]
    wrong = f"{broken}\n\ndef {made.function}(*args):\n    return None\n"
    diffs = {
        "gold": made.gold_patch,
        "nothing": unified_patch(path, broken, f"{broken}\n# looked at\n"),
        "wrong": unified_patch(path, broken, wrong),
        "broken": unified_patch(path, broken, f"import no_such_module\n{broken}"),
        "empty": "",
    }
    return [Job(f"{made.task_id}/{name}", made, text.encode()) for name, text in diffs.items()]


# -- ours


async def ours(
    target: str, jobs: Sequence[Job], runner: TestRunner, at_once: int, *, controls: bool
) -> tuple[Verdicts, float]:
    """The verdicts, and the seconds that they took."""
    config = GradingConfig(concurrency=at_once, controls=controls)
    tasks = {job.made.task_id: task_of(job.made, runner) for job in jobs}
    async with SandboxClient(ChannelConfig(target=target), owner="bench") as client:
        grader = Grader(ServiceHost(client, start_timeout_s=60.0), config)

        async def grade(job: Job) -> bool:
            found = await grader.grade(tasks[job.made.task_id], job.diff, attempt=job.name)
            return found.verdict is Verdict.SOLVED

        for task in tasks.values():  # the service has to know the repositories
            await client.put_environment(task.environment.tree)
        await grade(jobs[0])
        began = time.perf_counter()
        solved = await asyncio.gather(*(grade(job) for job in jobs))
        seconds = time.perf_counter() - began
    return dict(zip((job.name for job in jobs), solved, strict=True)), seconds


def task_of(made: GeneratedTask, runner: TestRunner) -> Task:
    task = from_generated(made, wall_s=60.0, cpu_s=30, command_timeout_s=0)
    assert isinstance(task.grader, TestGrader)
    return replace(task, grader=replace(task.grader, runner=runner))


# -- the rivals


def by_subprocess(job: Job, pristine: Path, packages: Path) -> bool:
    if not job.diff:
        return False
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        shutil.copytree(pristine / job.made.task_id, work)
        command = ["git", "apply", "-"]
        subprocess.run(command, cwd=work, input=job.diff, check=True, capture_output=True)
        for path, text in job.made.hidden_tests.items():
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            (work / path).write_text(text)
        return succeeded(
            [str(base_python().executable), "-m", "pytest", *OPTIONS, *job.tests],
            cwd=work,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(packages), **ENVIRON},
        )


def by_docker(job: Job, docker: Sequence[str]) -> bool:
    if not job.diff:
        return False
    options = ["run", "--rm", "-i", "--network", "none"]
    environ = [part for name, value in ENVIRON.items() for part in ("-e", f"{name}={value}")]
    command = ["sh", "-c", IN_CONTAINER, "sh", job.made.task_id, *job.tests]
    return succeeded([*docker, *options, *environ, IMAGE, *command], stdin=job.diff)


def succeeded(
    command: Sequence[str],
    *,
    stdin: bytes = b"",
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> bool:
    """Whether all tests passed; stops the benchmark where pytest did not say."""
    done = subprocess.run(command, input=stdin, cwd=cwd, env=env, capture_output=True)
    if done.returncode not in {0, 1, 2}:  # all passed, some failed, a file could not be imported
        raise SystemExit(
            f"{command[0]} ended with {done.returncode}: {done.stderr.decode()[-500:]}"
        )
    return done.returncode == 0


def rival(
    grade: Callable[[Job], bool], jobs: Sequence[Job], at_once: int
) -> tuple[Verdicts, float]:
    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as threads:
        solved = list(threads.map(grade, jobs))
    return dict(zip((job.name for job in jobs), solved, strict=True)), time.perf_counter() - began


# -- what they work with


def write_repositories(folder: Path, made: Sequence[GeneratedTask]) -> None:
    for task in made:
        for kind, files in (("repositories", task.files), ("hidden", task.hidden_tests)):
            for path, text in files.items():
                target = folder / kind / task.task_id / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text)


def start_docker(stack: ExitStack, folder: Path, packages: Path) -> list[str]:
    """A daemon with the image; the command that talks to it."""
    dockerd = stack.enter_context(running_dockerd())
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    with tempfile.TemporaryFile() as root:
        write_host_image(root)
        root.seek(0)
        with tarfile.open(fileobj=root, mode="a") as tar:
            tar.add(packages, f"opt/python/lib/{version}/site-packages")
            for kind in ("repositories", "hidden"):
                tar.add(folder / kind, kind)
        root.seek(0)
        dockerd.import_image(root, IMAGE)
    return ["docker", "-H", f"unix://{dockerd.socket}"]


# -- together


def cpu_s(service: RunningService) -> float:
    """Processor seconds so far of this process and what it has run, and of the service's."""
    makers = sandbox_makers(service.pid)
    own = own_cpu_s() + children_cpu_s() + ticks(service.pid, children=False)
    return own + sum(ticks(pid, children=whose) for pid in makers for whose in (False, True))


def measure(options: argparse.Namespace, stack: ExitStack) -> tuple[Samples, bool]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    folder.chmod(0o755)
    packages = folder / "packages"
    copy_pytest(packages)
    made = [make_task("train", number * SPREAD_OF_TASKS) for number in range(options.tasks)]
    write_repositories(folder, made)
    every = [job for task in made for job in jobs_of(task)]
    timed = [job for job in every if job.diff]
    empty = [job for job in every if not job.diff]
    service = RunningService(folder, f"local.site_packages={packages}")
    service.start()
    stack.callback(service.stop)
    at_once = options.at_once

    def run_ours(
        jobs: Sequence[Job], runner: TestRunner, *, controls: bool
    ) -> tuple[Verdicts, float]:
        return asyncio.run(ours(service.target, jobs, runner, at_once, controls=controls))

    ways: dict[str, Callable[[Sequence[Job]], tuple[Verdicts, float]]] = {}
    for runner in TestRunner:
        ways[f"ours.{runner}"] = partial(run_ours, runner=runner, controls=True)
        ways[f"ours.{runner}_without_controls"] = partial(run_ours, runner=runner, controls=False)
    plain = partial(by_subprocess, pristine=folder / "repositories", packages=packages)
    ways["subprocess"] = partial(rival, plain, at_once=at_once)
    if not options.without_docker:
        docker = start_docker(stack, folder, packages)
        ways["docker"] = partial(rival, partial(by_docker, docker=docker), at_once=at_once)

    found: Samples = defaultdict(list)
    expected = {job.name: job.name.endswith("/gold") for job in every}
    equal = True
    for number in range(options.rounds):
        for name, way in ways.items():
            used = cpu_s(service)
            verdicts, seconds = way(timed)
            found[f"{name}.per_s"].append(len(timed) / seconds)
            if name != "docker":
                found[f"{name}.cpu_ms"].append((cpu_s(service) - used) * 1000 / len(timed))
            verdicts |= way(empty)[0]
            wrong = sorted(job for job in expected if verdicts[job] != expected[job])
            if wrong:
                equal = False
                print(f"{name}: another verdict on {', '.join(wrong)}")
        shown = {name: round(values[-1], 2) for name, values in found.items()}
        print(number, f"load {os.getloadavg()[0]:.1f}", shown, flush=True)
    return found, equal


def ratios(figures: dict[str, float]) -> dict[str, float]:
    """How many times more gradings a second, and less processor time, than each rival."""
    found = {
        f"{prefix}cpu_ratio_subprocess": figures["subprocess.cpu_ms"] / figures[f"{ours}.cpu_ms"]
        for ours, prefix in (("ours.functions", ""), ("ours.pytest", "pytest."))
    }
    for rival_name in ("subprocess", "docker"):
        theirs = figures.get(f"{rival_name}.per_s")
        for runner, prefix in ((TestRunner.FUNCTIONS, ""), (TestRunner.PYTEST, "pytest.")):
            for controls in ("", "_without_controls"):
                if theirs:
                    name = f"{prefix}ratio_{rival_name}{controls}"
                    found[name] = figures[f"ours.{runner}{controls}.per_s"] / theirs
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--without-docker", action="store_true", help="leave `docker run` out")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("sandboxes need root; run it as root")
    if not options.without_docker and (missing := dockerd_missing()):
        sys.exit(f"{missing}; or leave this rival out by --without-docker")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    with ExitStack() as stack:
        samples, equal = measure(options, stack)
    figures = {name: statistics.median(values) for name, values in samples.items()}
    each = [{n: v[at] for n, v in samples.items()} for at in range(options.rounds)]
    by_round = [{**one, **ratios(one)} for one in each]
    figures |= ratios(figures)
    spread = {
        name: [round(pick(one[name] for one in by_round), 2) for pick in (min, max)]
        for name in figures
    }
    shown = {name: round(value, 2) for name, value in figures.items()}
    print(
        json.dumps(
            {
                "figures": {**shown, "verdicts_equal": equal},
                "spread": spread,
                "runs": options.rounds,
                "load_avg": round(os.getloadavg()[0], 2),
            }
        )
    )


if __name__ == "__main__":
    main()
