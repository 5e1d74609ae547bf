"""A repository's test suite in sandboxes: what passes without a bug, and what fails with one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swe_eval.errors import RepositoryError
from swe_eval.generate.failure import Failure
from swe_eval.generate.plan import PASSED, RUN_ENDS, SuiteRun, run_limit
from swe_eval.generate.repository_task import WORKDIR
from swe_eval.grading.prepare import is_protected
from swe_eval.making.box import MEMORY_BYTES, MIB, SPARE_S, Job, SuiteSandbox
from swe_eval.making.source_tree import SourceTree, matches
from swe_eval.tasks.task import MAX_TESTS

__all__ = ["Baseline", "Examined", "examine", "run_baseline"]

FILE_BYTES = 64 * MIB
_WALL_FACTOR = 4.0
_NO_TESTS = 5
"""Exit code of pytest."""
_OUTSIDE = ("/tmp", "/var/tmp", "/dev/shm", "~")  # noqa: S108 -- inside the sandbox
"""Where tests leave things beside the repository's folder; a sandbox shuts them out elsewhere."""


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
    defined: Mapping[str, str]
    """Of required tests whose function is in another file of the repository that one's id."""
    cpu_s: float
    """Processor time of a run, the slowest."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Files of the required tests, in order."""
        return tuple(dict.fromkeys(test.partition("::")[0] for test in self.required))


def _job(
    *,
    paths: Sequence[str],
    required: Sequence[str],
    cpu_s: float,
    runs: Sequence[Mapping[str, Any]],
) -> Job:
    return {
        "workdir": WORKDIR,
        "outside": list(_OUTSIDE),
        "paths": list(paths),
        "required": list(required),
        "cpu_s": cpu_s,
        "wall_s": _WALL_FACTOR * cpu_s + SPARE_S,
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
    # With coverage it takes longer.
    longer = {"cpu_s": 3 * timeout_s, "wall_s": 3 * job["wall_s"]}
    runs = [{**plain, "stop": True}, {**plain, "cover": True, "limits": longer}]
    results = await box.run({**job, "spans": ranges, "runs": runs}, seed=0)
    in_order, covered = _finished(results, 0, timeout_s), _finished(results, 1, timeout_s)
    results = await box.run({**job, "runs": [{**plain, "reverse": True}]}, seed=1)
    reverse = _finished(results, 0, timeout_s)
    required, left_out = _steady(in_order["tests"], reverse["tests"], tree, exclude)
    if not required:
        raise RepositoryError(
            f"no test of {tree.name} passes ({_counted(left_out)}): {_last_line(in_order)}"
        )
    if len(required) > MAX_TESTS:
        raise RepositoryError(
            f"{len(required)} tests of {tree.name} pass; a task has at most {MAX_TESTS}: --exclude "
            "files of tests"
        )
    cpu_s = max(in_order["cpu_s"], reverse["cpu_s"])
    if cpu_s > timeout_s / 2:
        raise RepositoryError(
            f"the tests of {tree.name} take {cpu_s:.0f} s; at most half of --test-timeout "
            f"({timeout_s:.0f} s) leaves room for a slower machine; raise it, or --exclude the "
            "slow ones"
        )
    # What else runs here makes it longer: the shorter one. What it waits is no less elsewhere.
    wall_s = min(in_order["wall_s"], reverse["wall_s"])
    if wall_s + cpu_s > timeout_s:
        raise RepositoryError(
            f"the tests of {tree.name} take {wall_s:.1f} s, {cpu_s:.1f} s of them on a processor; "
            "what they wait and twice the rest has to be within --test-timeout "
            f"({timeout_s:.0f} s); raise it, or --exclude the slow ones"
        )
    return Baseline(
        required=required,
        left_out=left_out,
        reached=_reached(covered["cover"], spans, frozenset(required)),
        defined=_defined(in_order.get("defined"), required, tree),
        cpu_s=cpu_s,
    )


def _defined(said: object, required: Sequence[str], tree: SourceTree) -> dict[str, str]:
    found = said if isinstance(said, dict) else {}
    places = {test: str(found[test]) for test in required if test in found}
    return {test: at for test, at in places.items() if at.partition("::")[0] in tree.texts}


def _finished(results: Sequence[Mapping[str, Any]], n: int, timeout_s: float) -> Mapping[str, Any]:
    found = results[n] if n < len(results) else {"end": "died", "log": ""}
    if found["end"] == "finished":
        return found
    if found["end"] == "timeout":
        raise RepositoryError(
            f"the tests take longer than {timeout_s:.0f} s; raise --test-timeout, or --exclude the "
            "slow ones"
        )
    if found.get("exit_code") == _NO_TESTS:
        raise RepositoryError(
            f"pytest finds no test that it can run: {_last_line(found)}; expected functions "
            "`test_*` in test_*.py or *_test.py, not all of them skipped"
        )
    raise RepositoryError(
        "pytest can't run the tests as they are "
        f"(here and in grading it runs without plug-ins): {_last_line(found)}; mend that "
        "(options of plug-ins have to go from addopts), "
        "--exclude files that can't be collected, or name an environment that has what they need "
        "(--python)"
    )


def _last_line(found: Mapping[str, Any]) -> str:
    lines = [line.strip() for line in str(found.get("log", "")).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith(("E ", "ERROR")) or "error: " in line]
    return " / ".join((telling or lines)[-3:])[-600:] or "no output"


def _is_test(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.startswith("test_") or name.endswith("_test.py")


def _test_path(path: str) -> str:
    # Arguments of pytest: neither an option, nor a file of arguments, nor an id.
    return "" if path.startswith(("-", "@")) or "::" in path or "[" in path else path


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
    cpu_s = run_limit(baseline.cpu_s, timeout_s)
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
