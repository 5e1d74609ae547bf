"""`tailrace tasks`: every malformed task by file, field and reason; exit code 2 if there is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from grpo_trainer.sft.traces import parse_trace
from swe_eval.generate import make_task, to_harbor
from swe_eval.tasks.fields import Fields
from swe_eval.tasks.traces import read_trace, to_atif
from tailrace_cli.cli import app
from typer.testing import CliRunner


def validate(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["tasks", "validate", *arguments], env={"COLUMNS": "200"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two good tasks, a broken one, and a file with a row that lacks everything."""
    for number in range(3):
        to_harbor(make_task("train", number), tmp_path)
    broken = tmp_path / make_task("train", 1).task_id
    (broken / "task.toml").write_text('version = "3.0"\n')
    (tmp_path / "rows.jsonl").write_text('{"instance_id": "x", "repo": "o/n"}\nno JSON\n')
    return tmp_path


def test_every_problem_is_told_and_the_others_go_on(folder: Path) -> None:
    code, output, _ = validate(str(folder))
    broken, row, line, last = output.splitlines()
    assert code == 2
    assert broken.startswith(f"MalformedTask: {make_task('train', 1).task_id}/task.toml, version:")
    assert row.startswith(f"MalformedTask: {folder}/rows.jsonl:1 (x), base_commit, problem_state")
    assert line.startswith(f"MalformedTask: {folder}/rows.jsonl:2: expected a JSON object")
    assert last == "2 of 5 tasks can be used"


def test_several_paths_and_json(folder: Path) -> None:
    good = [str(folder / make_task("train", number).task_id) for number in (0, 2)]
    assert validate(*good) == (0, "2 of 2 tasks can be used\n", "")
    code, output, _ = validate(*good, str(folder / "rows.jsonl"), "--json")
    found = json.loads(output)
    assert code == 2
    assert len(found["tasks"]) == 2
    assert [(p["line"], p["task"]) for p in found["problems"]] == [(1, "x"), (2, "")]
    assert found["problems"][0]["found"] == "nothing"


def test_a_path_without_tasks_is_wrong_input(folder: Path) -> None:
    (folder / "empty").mkdir()
    for path, words in (("absent", "is not there"), ("empty", "no folder with a task.toml")):
        code, output, message = validate(str(folder), str(folder / path))
        assert (code, output) == (2, "")
        assert words in message


def test_a_trace_that_becomes_atif_is_one_that_training_reads() -> None:
    call = {"function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    row = {
        "instance_id": "o__n-1",
        "resolved": 1,
        "messages": [
            {"role": "system", "content": "You fix bugs."},
            {"role": "user", "content": "Fix it."},
            {"role": "assistant", "content": "", "tool_calls": [call, call]},
            {"role": "tool", "content": "a.py"},
            {"role": "tool", "content": "a.py"},
            {"role": "assistant", "content": "Done."},
        ],
    }
    trace = parse_trace(json.dumps(to_atif(read_trace(Fields("", "x", row)))), "x:1")
    assert trace.solved is True
    assert [len(turn.observations) for turn in trace.turns] == [2, 0]
    assert trace.turns[0].text.count("<tool_call>") == 2
