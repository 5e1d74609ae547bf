"""`tailrace tasks selftest`: a table, a file that task sets read, exit codes; goes on by itself."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console
from swe_eval import EvalConfig, HarborSetConfig, MalformedTaskError, open_task_sets
from swe_eval.core.selftest import Decision, Finding, Flaw, Outcome
from swe_eval.generate import make_task, to_harbor
from swe_eval.tasks.harbor import EnvironmentMode
from swe_eval.tasks.selftest_file import Record, SelfTestFile, read_records
from tailrace_cli.cli import app
from tailrace_cli.sandbox_service import sandbox_alone
from tailrace_cli.stack import load_stack
from tailrace_cli.stack.files import LOCAL_STACK
from tailrace_cli.tasks.selftest import Found, SelfTestOptions, read_tasks, show
from typer.testing import CliRunner

MADE = [make_task("train", number) for number in range(2)]
GOOD, BAD = (f"tailrace/{made.task_id}" for made in MADE)


def selftest(*arguments: str | Path) -> tuple[int, str, str]:
    command = ["tasks", "selftest", "--environment", "tree", *map(str, arguments)]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good task, and one whose solution does nothing."""
    for made in MADE:
        to_harbor(made, tmp_path / "tasks")
    (tmp_path / "tasks" / MADE[1].task_id / "solution" / "gold.patch").write_text("")
    return tmp_path / "tasks"


@pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes of the local back-end need root")
def test_tasks_are_tested_once_and_the_bad_ones_can_be_left_out(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out" / "selftest.jsonl"
    code, output, _ = selftest(folder, "--out", out)
    assert code == 1
    lines = [line.split(maxsplit=2) for line in output.splitlines()]
    assert [BAD, "quarantined", "gold_unsolved: empty_diff: nothing was changed"] in [
        [part.strip() for part in line] for line in lines
    ]
    last = f"2 tasks: 1 kept, 1 quarantined, 0 not known for faults; {out}"
    assert output.splitlines()[-1] == last
    config = HarborSetConfig(name="mine", path=folder, environment="tree", quarantine=out)
    (served,) = open_task_sets([config]).task_sets
    assert [ref.task_id for ref in served.refs(0, 9)] == [GOOD]
    # Nothing is left to be tested: no sandbox service is asked, and this one is none.
    code, output, _ = selftest(folder, "--out", out, "--sandbox", "127.0.0.1:9", "--json")
    found = json.loads(output)
    assert (code, found["kept"], found["faults"]) == (1, [GOOD], [])
    assert [r["findings"][0]["flaw"] for r in found["quarantined"]] == ["gold_unsolved"]
    # Mended, it is another task, and a task that can't be read counts as wrong input.
    to_harbor(MADE[1], tmp_path / "mended")
    (tmp_path / "mended" / "broken").mkdir()
    (tmp_path / "mended" / "broken" / "task.toml").write_text('version = "3.0"\n')
    code, output, _ = selftest(tmp_path / "mended", "--out", out, "--json")
    found = json.loads(output)
    assert (code, found["kept"]) == (2, [BAD])
    assert [problem["task"] for problem in found["problems"]] == ["broken"]
    assert {r.decision.outcome for r in read_records(out).values()} == {"kept"}
    # A set of the stack's EvalService, tested with the set's own limits.
    few = 'eval.task_sets=[{kind="generated", name="few", count=2, first=2, test_wall_s=7.0}]'
    code, output, _ = selftest("--task-set", "few", "--set", few, "--out", out, "--json")
    kept = [make_task("train", number).task_id for number in (2, 3)]
    assert (code, json.loads(output)["kept"]) == (0, kept)


def test_a_service_that_is_not_there_is_told_at_once(folder: Path, tmp_path: Path) -> None:
    code, output, message = selftest(folder, "--out", tmp_path / "f", "--sandbox", "127.0.0.1:9")
    assert (code, output) == (1, "")
    assert "127.0.0.1:9" in message
    assert read_records(tmp_path / "f") == {}


def test_wrong_input_is_one_message(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("a note\n")
    busy = SelfTestFile(tmp_path / "busy")
    for arguments, words in (
        ([folder, "--out", tmp_path / "busy"], f"another self-test (process {os.getpid()}); wait"),
        ([], "name paths to tasks, or a set by --task-set; found neither"),
        ([folder, "--task-set", "train"], "found both"),
        (["--task-set", "nope"], "no set 'nope'; the stack has: train, heldout"),
        ([tmp_path / "absent"], "is not there"),
        ([folder, "--sandbox", "nowhere"], "--sandbox: "),
        ([folder, "--environment", "docker"], "--environment: expected auto, tree, image"),
        ([folder, "--out", tmp_path / "notes"], "notes:1: found b'a note'"),
        ([folder, "--out", tmp_path], "Is a directory"),
        ([folder, "--out", tmp_path / "notes" / "x"], "notes: File exists"),
        ([folder, "--out", "/proc/x/y"], "/proc/x: No such file"),
        ([folder, "--set", "eval.grading.conurrency=3"], "grading.conurrency"),
    ):
        code, output, message = selftest(*arguments)
        assert (code, output) == (2, ""), arguments
        assert words in message
    busy.close()


@pytest.mark.parametrize("terminal", [False, True], ids=["piped", "terminal"])
def test_no_task_id_is_cut_however_narrow_the_output(tmp_path: Path, terminal: bool) -> None:
    name = "tailrace/" + "a-long-name-" * 9
    flaws = Finding(flaw=Flaw.FLAKY, detail="what flipped " * 20), Finding(flaw=Flaw.EMPTY_SOLVED)
    decision = Decision(outcome=Outcome.QUARANTINED, findings=flaws)
    found = Found(records=[Record(task_id=name, digest="d", repeat=2, decision=decision)])
    text = io.StringIO()
    show(found, tmp_path, Console(file=text, width=40, force_terminal=terminal))
    assert text.getvalue().count(name) == 2
    if not terminal:
        assert len(text.getvalue().splitlines()) == 4


def test_one_id_for_two_tasks_of_two_paths_is_a_twin_and_the_same_task_twice_is_none(
    tmp_path: Path,
) -> None:
    for place in ("one", "same", "other"):
        to_harbor(MADE[0], tmp_path / place)
    (tmp_path / "other" / MADE[0].task_id / "solution" / "gold.patch").write_text("")
    problems: list[MalformedTaskError] = []
    paths = [tmp_path / place for place in ("one", "same", "other")]
    options = SelfTestOptions(paths=paths, environment=EnvironmentMode.TREE, out=tmp_path / "f")
    tasks = list(read_tasks(options, EvalConfig(), problems))
    assert [task.task_id for task in tasks] == [GOOD]
    assert [(p.field, p.expected) for p in problems] == [("task.name", "a name of its own")]


def test_the_service_it_starts_is_the_stacks_own_at_another_place(tmp_path: Path) -> None:
    stack = load_stack(LOCAL_STACK, settings=["sandbox.limits.sandboxes=7"])
    alone = sandbox_alone(stack, "sandbox", "127.0.0.1:1234", tmp_path)
    (process,) = alone.processes
    assert process.target == "127.0.0.1:1234"
    assert process.config["server"]["bind"] == "127.0.0.1:1234"
    assert process.config["limits"] == {"sandboxes": 7}
    assert process.config["state_dir"].startswith(str(tmp_path))
    assert EvalConfig.model_validate(stack.processes[1].config).task_sets[0].name == "train"
