"""`tailrace eval compare`: the same tasks, paired, and what makes two runs unlike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from swe_eval import list_digest
from tailrace_cli.cli import app
from tailrace_cli.demo.folder import FolderError
from tailrace_cli.evaluation.compare import compare
from tailrace_cli.evaluation.result import (
    RESULT,
    EvaluationResult,
    ScoredTask,
    Stratum,
    VersionTokens,
    save,
)
from tailrace_cli.report.evaluation import write_evaluation_report
from typer.testing import CliRunner


def result(*solved: int, name: str = "a", first: int = 0, **changes: Any) -> EvaluationResult:
    """Tasks from number `first` on, solved so often in 4 attempts; strata take turns."""
    tasks = tuple(
        ScoredTask(task_id=f"t{i}", stratum=("x", "y|$z")[i % 2], solved=s, attempts=4)
        for i, s in enumerate(solved, start=first)
    )
    base: dict[str, Any] = {
        "name": name,
        "task_set": "heldout",
        "task_list_digest": list_digest([t.task_id for t in tasks]),
        "stratified_by": ("kind",),
        "task_seed": 0,
        "attempts": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "pinned_version": 7,
        "version_tokens": (VersionTokens(version=7, oldest_kv_version=7, tokens=9),),
        "listed": len(tasks),
        "tasks": len(tasks),
        "pass_at": (),
        "outcomes": {},
        "faults": {},
        "strata": (),
        "by_task": tasks,
        "quarantined": (),
        "wall_s": 1.0,
    }
    return EvaluationResult(**{**base, **changes})


WORSE, BETTER = result(*[0, 1, 2, 3] * 5), result(*[1, 2, 3, 4] * 5, name="b")


def test_the_difference_is_of_pairs_and_has_a_p_value() -> None:
    found = compare(WORSE, BETTER)
    assert (found.a.pass_at_1, found.b.pass_at_1) == (0.375, 0.625)
    assert (found.paired.tasks, found.paired.difference) == (20, 0.25)
    assert found.paired.p_value == pytest.approx(2 / 2**20)
    assert [(s.name, s.paired.tasks) for s in found.strata] == [("x", 10), ("y|$z", 10)]
    assert found.warnings == ()
    assert compare(BETTER, WORSE).paired.difference == -0.25


def test_only_tasks_that_both_scored_are_compared() -> None:
    found = compare(result(4, 4, 0, 0), result(1, 1, 0, 0, first=2))
    assert (found.paired.tasks, found.paired.difference) == (2, 0.25)
    assert "the lists of tasks differ: 2 are shared and scored, of 4 and 4" in found.warnings
    with pytest.raises(FolderError, match="share no scored task"):
        compare(result(1), result(1, first=5))


def test_what_makes_the_runs_unlike_is_said() -> None:
    other = result(
        *[1] * 20, name="b", pinned_version=0, temperature=0.5, attempts=8,
        version_tokens=(
            VersionTokens(version=3, oldest_kv_version=3, tokens=1),
            VersionTokens(version=5, oldest_kv_version=3, tokens=1),
        ),
    )  # fmt: skip
    assert compare(WORSE, other).warnings == (
        "temperature is 1.0 in A and 0.5 in B",
        "attempts is 4 in A and 8 in B",
        "B: not a checkpoint's score: no version was pinned, and the tokens came from what the "
        "engines held (versions 3, 5)",
    )
    fewer = WORSE.model_copy(update={"by_task": WORSE.by_task[1:], "tasks": 19})
    assert compare(fewer, BETTER).warnings == (
        "19 of 20 tasks are scored in both; the rest kept faulting",
    )


def test_the_command_prints_a_table_or_json(tmp_path: Path) -> None:
    for name, saved in (("a", WORSE), ("b", BETTER)):
        (tmp_path / name).mkdir()
        save(tmp_path / name, RESULT, saved)
    arguments = ["eval", "compare", str(tmp_path / "a"), str(tmp_path / "b")]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    assert done.exit_code == 0
    assert "B - A" in done.stdout
    assert "+0.250" in done.stdout
    assert "p = 1.91e-06" in done.stdout
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(done.stdout)["paired"]["difference"] == 0.25


def test_names_of_strata_can_not_break_a_report(tmp_path: Path) -> None:
    name = "a|b $x$ <b>"
    odd = Stratum(name=name, tasks=1, attempts=4, pass_rate=0.5, ci95=(0.0, 1.0))
    write_evaluation_report(tmp_path, WORSE.model_copy(update={"strata": (odd,)}))
    assert "<b>" not in (tmp_path / "report.html").read_text()
    assert r"| a\|b $x$ <b> | 1 | 4 | 0.500 |" in (tmp_path / "report.md").read_text()
