"""Rows of SWE-bench 5 and SWE-smith as tasks."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from swe_eval.config import RowSetConfig
from swe_eval.errors import MalformedTaskError, TaskSetError, UnsupportedTaskError
from swe_eval.grading.parsers import graded_part
from swe_eval.tasks import swebench, swesmith
from swe_eval.tasks.fields import Fields
from swe_eval.tasks.sets import ReadSet
from swe_eval.tasks.task import EnvironmentSource, LogGrader, Task

ROWS = Path(__file__).parent.parent / "data" / "rows"
SMITH = "pandas-dev__pandas.95280573.pr_53652.json"
COLUMNS_OF_5 = {
    "image": "swebench/sweb.eval.x86_64.sympy_1776_sympy-13031:latest",
    "log_parser": "parse_log_sympy",
    "eval_type": "pass_and_fail",
    "eval_script": "#!/bin/bash\n: '>>>>> Start Test Output'\nbin/test\n"
    ": '>>>>> End Test Output'\n",
}


def bench_row() -> dict[str, Any]:
    line = (ROWS / "swe_agent_lite_test.jsonl").read_text().splitlines()[1]
    return {**json.loads(line), **COLUMNS_OF_5}


def smith_row() -> dict[str, Any]:
    row: dict[str, Any] = json.loads((ROWS / SMITH).read_text())
    return row


def read(row: dict[str, Any]) -> Task:
    fields = Fields("id", "rows.jsonl", row, line=7)
    return swesmith.read_task(fields) if "image_name" in row else swebench.read_task(fields)


def test_a_row_of_swe_bench_5_is_a_task() -> None:
    row = bench_row()
    base = row["base_commit"]
    row["eval_script"] = f"git checkout {base} tests/a.py\n" + row["eval_script"]
    task = read({**row, "difficulty": "1-4 hours"})
    assert (task.task_id, task.repository) == ("sympy__sympy-13031", "sympy/sympy")
    assert (task.kind, task.instruction) == ("1-4 hours", row["problem_statement"])
    assert task.columns == {"difficulty": "1-4 hours", "version": row["version"]}
    assert task.environment.source is EnvironmentSource.IMAGE
    assert (task.environment.image, task.environment.workdir) == (row["image"], "/testbed")
    assert isinstance(task.grader, LogGrader)
    assert task.grader.parser == "parse_log_sympy"
    # The history goes, with what came after the base commit, and with that commit's name.
    assert task.environment.forget_history
    assert task.grader.script == row["eval_script"].replace(base, "HEAD")
    assert task.grader.fail_to_pass == ("test_sparse_matrix",)
    assert task.grader.protected == {"sympy/matrices/tests/test_sparse.py"}
    assert task.reference is not None
    assert task.reference.patch.decode().startswith("diff --git a/sympy/matrices/sparse.py")


def test_lists_written_as_json_are_lists_and_pytests_progress_is_no_test() -> None:
    task = read({**bench_row(), "PASS_TO_PASS": '["t::a", "[100%]", "t::b"]'})
    assert isinstance(task.grader, LogGrader)
    assert task.grader.pass_to_pass == ("t::a", "t::b")


@pytest.mark.parametrize(
    ("make", "changes", "field", "expected"),
    [
        (bench_row, {"repo": "sympy"}, "repo", "owner/name"),
        (bench_row, {"base_commit": "HEAD"}, "base_commit", "hash"),
        (bench_row, {"problem_statement": " "}, "problem_statement", "text"),
        (bench_row, {"patch": "no patch"}, "patch", "git's format"),
        (bench_row, {"test_patch": ""}, "test_patch", "text"),
        (bench_row, {"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS", "at least one"),
        (bench_row, {"FAIL_TO_PASS": "test_a"}, "FAIL_TO_PASS", "JSON"),
        (bench_row, {"PASS_TO_PASS": [1]}, "PASS_TO_PASS", "a list of tests"),
        (bench_row, {"PASS_TO_PASS": ["t"] * 20_000}, "PASS_TO_PASS", "at most 20000"),
        (bench_row, {"hints_text": 3}, "hints_text", "a string"),
        (bench_row, {"eval_type": "sometimes"}, "eval_type", "one of"),
        (bench_row, {"eval_type": "fail_only"}, "eval_type", "has failed"),
        (bench_row, {"log_parser": "parse_log_jest"}, "log_parser", "parse_log_django"),
        (smith_row, {"patch": "x"}, "patch", "git's format"),
        (smith_row, {"patch": "diff --git a/x b/x\n@@ -1,3 +1 @@\n-a\n"}, "patch", "text files"),
        (smith_row, {"FAIL_TO_PASS": []}, "FAIL_TO_PASS", "at least one"),
        (smith_row, {"problem_statement": ""}, "problem_statement", "text"),
    ],
)
def test_a_wrong_field_is_named_with_file_line_and_reason(
    make: Callable[[], dict[str, Any]], changes: dict[str, Any], field: str, expected: str
) -> None:
    with pytest.raises(MalformedTaskError) as caught:
        read({**make(), **changes})
    error = caught.value
    assert (error.file, error.line, error.field) == ("rows.jsonl", 7, field)
    assert expected in error.expected
    assert str(error).startswith(f"rows.jsonl:7 (id), {field}: expected ")
    unsupported = field == "log_parser" or changes.get("eval_type") == "fail_only"
    assert isinstance(error, UnsupportedTaskError) == unsupported


@pytest.mark.parametrize("column", [*swebench.COLUMNS, *swebench.COLUMNS_OF_5])
def test_a_column_that_is_missing_is_named(column: str) -> None:
    row = bench_row()
    del row[column]
    with pytest.raises(MalformedTaskError) as caught:
        read(row)
    assert (caught.value.field, caught.value.found) == (column, "nothing")


def test_a_row_of_swe_smith_is_a_bug_put_into_a_repositorys_image() -> None:
    row = smith_row()
    task = read(row)
    assert (task.repository, task.kind) == ("pandas-dev/pandas", "pr")
    environment = task.environment
    assert environment.source is EnvironmentSource.DOCKERFILE
    image = "swebench/swesmith.x86_64.pandas-dev_1776_pandas.95280573"
    assert environment.dockerfile.startswith(f"FROM {image}\nCOPY bug.patch /tmp/bug.patch\n")
    assert "rm -rf /tmp/bug.patch .git" in environment.dockerfile
    assert environment.files["bug.patch"].content.decode().strip() == row["patch"].strip()
    assert isinstance(task.grader, LogGrader)
    assert len(task.grader.required) == 11
    assert task.grader.script.count("pandas/tests/indexing/test_datetime.py") == 1
    assert swesmith.TEST_COMMAND in task.grader.script
    # Both markers on lines of their own, as the parser wants them.
    assert graded_part(task.grader.script).text.startswith(swesmith.TEST_COMMAND)
    assert task.reference is not None
    assert b'-        if keyarr.dtype.kind in "mM":' in task.reference.patch


def test_the_image_gets_the_bug_and_no_history_and_the_reference_repairs_it(
    tmp_path: Path,
) -> None:
    def shell(command: str) -> str:
        return subprocess.run(
            ["/bin/sh", "-c", command], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    bug = "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-right\n+wrong\n"
    task = read({**smith_row(), "patch": bug})
    work = tmp_path / "testbed"
    work.mkdir()
    (work / "x.py").write_text("right\n")
    shell(
        "cd testbed && git init -q && git add -A && git -c user.name=a -c user.email=a commit -qm a"
    )
    (tmp_path / "bug.patch").write_bytes(task.environment.files["bug.patch"].content)
    run = task.environment.dockerfile.partition("\nRUN ")[2].replace("\\\n", "")
    shell(run.replace("/testbed", str(work)).replace("/tmp/bug.patch", str(tmp_path / "bug.patch")))
    assert (work / "x.py").read_text() == "wrong\n"
    assert shell("cd testbed && git log --all --format=%s && git status --short") == "task\n"
    assert not (tmp_path / "bug.patch").exists()
    assert task.reference is not None
    (tmp_path / "gold.patch").write_bytes(task.reference.patch)
    shell("cd testbed && git apply ../gold.patch")
    assert (work / "x.py").read_text() == "right\n"


def test_a_profile_says_how_a_repository_is_tested(tmp_path: Path) -> None:
    file = tmp_path / "profiles.json"
    mirror = smith_row()["repo"]
    file.write_text(json.dumps([{"mirror": mirror, "test_cmd": "make check"}]))
    fields = Fields("id", "rows.jsonl", smith_row())
    task = swesmith.read_task(fields, swesmith.read_profiles(file))
    assert isinstance(task.grader, LogGrader)
    assert "\nmake check pandas/" in task.grader.script
    assert "getmoto" not in swesmith.read_profiles(ROWS / "repos.json")
    file.write_text('[{"mirror": "x"}]')
    with pytest.raises(TaskSetError, match="mirror and test_cmd"):
        swesmith.read_profiles(file)


def test_a_set_of_rows_leaves_out_what_is_malformed_and_twins(tmp_path: Path) -> None:
    rows = [bench_row(), {**bench_row(), "instance_id": "x"}, bench_row(), {"instance_id": "y"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{\n")
    config = RowSetConfig(
        kind="swebench", name="b", location=str(file), test_wall_s=60, command_timeout_s=5
    )
    task_set = ReadSet(config)
    assert [ref.task_id for ref in task_set.refs(0, 9)] == ["sympy__sympy-13031", "x"]
    assert [(p.line, p.field.partition(",")[0]) for p in task_set.problems] == [
        (3, "instance_id"),
        (4, "repo"),
        (5, ""),
    ]
    task = task_set.find("x")
    assert task is not None
    assert (task.grader.wall_s, task.command_timeout_s) == (60, 5)


def test_a_set_with_no_row_to_use_says_the_first_reason() -> None:
    config = RowSetConfig(kind="swebench", name="b", location=str(ROWS / "verified_astropy.jsonl"))
    with pytest.raises(TaskSetError, match=r"task set 'b'.*none of the 1 tasks.*SWE-bench 5"):
        ReadSet(config)


def test_a_set_of_swe_smith() -> None:
    task_set = ReadSet(RowSetConfig(kind="swesmith", name="s", location=str(ROWS / SMITH)))
    assert [(ref.repository, ref.kind) for ref in task_set.refs(0, 9)] == [
        ("pandas-dev/pandas", "pr")
    ]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("o__n.12345678.pr_7", "pr"), ("o__n.12345678.func_basic__abc", "func_basic")],
)
def test_the_strategy_is_the_kind(name: str, strategy: str) -> None:
    assert swesmith.strategy_of(name) == strategy
