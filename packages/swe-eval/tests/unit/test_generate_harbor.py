from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
from swe_eval.generate import HarborFolderExistsError, make_task, to_harbor


def test_folder_is_a_harbor_task(tmp_path: Path) -> None:
    task = make_task("train", 4)
    folder = to_harbor(task, tmp_path)
    assert folder == tmp_path / task.task_id
    settings = tomllib.loads((folder / "task.toml").read_text())
    assert settings["task"]["name"] == f"tailrace/{task.task_id}"
    assert settings["metadata"]["kind"] == task.kind
    assert settings["metadata"]["fail_to_pass"] == list(task.fail_to_pass)
    assert settings["verifier"]["environment_mode"] == "separate"
    assert (folder / "instruction.md").read_text() == task.instruction + "\n"
    assert (folder / "environment/Dockerfile").read_text().startswith("FROM ")
    for script in ("tests/test.sh", "solution/solve.sh"):
        assert os.access(folder / script, os.X_OK)


def test_hidden_tests_and_solution_stay_out_of_the_environment(tmp_path: Path) -> None:
    task = make_task("train", 5)
    folder = to_harbor(task, tmp_path)
    seen = {path.name for path in (folder / "environment").rglob("*") if path.is_file()}
    assert seen == {"Dockerfile", *task.files}
    hidden = {path.name for path in (folder / "tests" / "hidden").iterdir()}
    assert hidden == set(task.hidden_tests)


def test_solution_applies_to_the_repository(tmp_path: Path) -> None:
    task = make_task("heldout", 2)
    folder = to_harbor(task, tmp_path)
    subprocess.run(
        ["git", "apply", "--check", str(folder / "solution/gold.patch")],
        cwd=folder / "environment/repo",
        check=True,
        timeout=30,
    )


def test_existing_folder_is_never_overwritten(tmp_path: Path) -> None:
    task = make_task("train", 6)
    to_harbor(task, tmp_path)
    with pytest.raises(HarborFolderExistsError, match="exists"):
        to_harbor(task, tmp_path)
