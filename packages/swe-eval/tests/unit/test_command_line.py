"""`python -m swe_eval`: what an operator can get wrong is one clear message and exit code 2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from swe_eval.__main__ import app
from swe_eval.generate import make_task
from typer.testing import CliRunner

SAMPLES = Path(__file__).parent.parent / "data" / "harbor"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_make_writes_directories_that_validate_accepts(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    status, text = run("make", str(folder), "--split", "heldout", "--count", "3", "--first", "5")
    assert (status, text) == (0, f"3 tasks in {folder}\n")
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(make_task("heldout", i).task_id for i in range(5, 8))
    status, text = run("validate", str(folder))
    assert (status, text) == (0, "3 of 3 tasks can be used\n")


def test_make_never_overwrites(tmp_path: Path) -> None:
    assert run("make", str(tmp_path), "--count", "1")[0] == 0
    status, text = run("make", str(tmp_path), "--count", "1")
    assert status == 2
    assert "exists" in text


def test_validate_names_each_task_that_can_not_be_used_and_goes_on() -> None:
    status, text = run("validate", str(SAMPLES))
    assert status == 2
    lines = text.splitlines()
    assert lines[-1] == "5 of 9 tasks can be used"
    assert any(
        line.startswith("UnsupportedTask: hello-multi-step-simple/task.toml") for line in lines
    )
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["make", "{tmp}", "--split", "test"], "--split: expected one of"),
        (["validate", "{tmp}/absent"], "is not there"),
        (["validate", "{tmp}"], "no folder with a task.toml"),
    ],
)
def test_wrong_arguments_are_told(tmp_path: Path, arguments: list[str], words: str) -> None:
    status, text = run(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert status == 2
    assert words in text


def test_traces_writes_atif_and_never_overwrites(tmp_path: Path) -> None:
    rows, out = SAMPLES.parent / "rows" / "swesmith_ft_xml.jsonl", tmp_path / "out.jsonl"
    status, text = run("traces", str(rows), str(out))
    assert (status, text) == (0, f"1 traces in {out}, 0 can't be used\n")
    assert json.loads(out.read_text())["schema_version"] == "ATIF-v1.8"
    assert run("traces", str(rows), str(out))[0] == 2
    status, text = run("traces", "--solved", str(rows), str(tmp_path / "solved.jsonl"))
    assert text.startswith("0 traces")


@pytest.mark.parametrize("beside_tasks", [False, True])
def test_traces_of_repositories_that_are_evaluated_are_left_out(
    tmp_path: Path, beside_tasks: bool
) -> None:
    rows, heldout = SAMPLES.parent / "rows" / "swesmith_ft_xml.jsonl", tmp_path / "heldout.jsonl"
    if beside_tasks:
        assert run("make", str(tmp_path / "evaluated"), "--count", "1")[0] == 0
        heldout = tmp_path / "evaluated" / "heldout.jsonl"
    heldout.write_text(
        json.dumps({"instance_id": "pandas-dev__pandas-1", "repo": "pandas-dev/Pandas"})
    )
    out = tmp_path / "out.jsonl"
    against = heldout.parent if beside_tasks else heldout
    status, text = run("traces", str(rows), str(out), "--against", str(against))
    assert (status, out.read_text()) == (0, "")
    assert "pandas-dev__pandas-1 share repository pandas-dev/pandas" in text
    assert text.endswith(f"0 traces in {out}, 1 left out, 0 can't be used\n")


def test_who_can_not_be_kept_away_from_is_no_set_to_compare_with(tmp_path: Path) -> None:
    rows, heldout = SAMPLES.parent / "rows" / "swesmith_ft_xml.jsonl", tmp_path / "heldout.jsonl"
    heldout.write_text('{"instance_id": "a__b-1"}')
    out = tmp_path / "out.jsonl"
    status, text = run("traces", str(rows), str(out), "--against", str(heldout))
    assert (status, out.exists()) == (2, False)
    assert "repo" in text


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("gradign.concurrency=3", "gradign.concurrency"),
        ("grading.concurrency=0", "grading.concurrency"),
        ('task_sets=[{kind="harbor", name="x", path="/nowhere"}]', "/nowhere is not a folder"),
        ('task_sets=[{kind="swebench", name="x", location="/nowhere"}]', "/nowhere: no .json"),
        ('task_sets=[{kind="generated", name="x", split="test"}]', "split"),
        ("server.bind=0.0.0.0:7102", "tls_certificate"),
    ],
)
def test_serve_refuses_wrong_settings(setting: str, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "swe_eval", "serve", "--set", setting],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
