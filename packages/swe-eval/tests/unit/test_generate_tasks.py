from __future__ import annotations

import collections
import random
import subprocess
import sys
from pathlib import Path

import pytest
from swe_eval.generate import (
    GRAMMAR_KINDS,
    TEMPLATES,
    GeneratedTask,
    Split,
    SplitOverlapError,
    build_repository,
    check_disjoint,
    make_task,
    task_at,
    write_issue,
)
from swe_eval.generate.execute import run_tests
from swe_eval.generate.grammar import draw_function
from swe_eval.generate.repository import templates_for

SAMPLE = [make_task(split, index) for split in Split for index in range(26)]


def write(files: dict[str, str], folder: Path) -> None:
    for path, text in files.items():
        (folder / path).write_text(text, encoding="utf-8")


def repaired(task: GeneratedTask, folder: Path) -> dict[str, str]:
    """The task's files after `git apply` of the gold patch."""
    write(dict(task.files), folder)
    subprocess.run(
        ["git", "apply", "-"], cwd=folder, input=task.gold_patch, text=True, check=True, timeout=30
    )
    return {path: (folder / path).read_text(encoding="utf-8") for path in task.files}


@pytest.mark.parametrize("task", SAMPLE, ids=lambda task: task.task_id)
def test_hidden_tests_fail_and_pass_as_the_task_says(task: GeneratedTask) -> None:
    results = run_tests(task.files, task.hidden_tests)
    assert task.fail_to_pass
    assert {name for name, result in results.items() if not result.passed} == set(task.fail_to_pass)
    assert {name for name, result in results.items() if result.passed} == set(task.pass_to_pass)


@pytest.mark.parametrize("task", SAMPLE[::7], ids=lambda task: task.task_id)
def test_gold_patch_repairs_and_changes_one_line(task: GeneratedTask, tmp_path: Path) -> None:
    after = repaired(task, tmp_path)
    assert all(result.passed for result in run_tests(after, task.hidden_tests).values())
    before = task.files[task.module].splitlines()
    changed = [
        number
        for number, (old, new) in enumerate(
            zip(before, after[task.module].splitlines(), strict=True), start=1
        )
        if old != new
    ]
    assert changed == [task.line]


@pytest.mark.parametrize("task", SAMPLE[::9], ids=lambda task: task.task_id)
def test_visible_test_says_in_one_line_what_is_wrong(task: GeneratedTask, tmp_path: Path) -> None:
    script = f"test_{task.module}"

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-B", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )

    write(dict(task.files), tmp_path)
    broken = run()
    assert broken.returncode == 1
    assert broken.stdout.count("\n") == 1
    assert broken.stdout.startswith(f"{task.function}(")
    repaired(task, tmp_path)
    fixed = run()
    assert (fixed.returncode, fixed.stdout) == (0, "ok\n")
    (tmp_path / task.module).write_text("def broken(:\n", encoding="utf-8")
    assert run().stdout.startswith("SyntaxError: ")


def test_visible_test_passes_under_a_test_runner_after_the_repair(tmp_path: Path) -> None:
    task = make_task("train", 1)
    visible = {path: text for path, text in task.files.items() if path.startswith("test_")}
    sources = {path: text for path, text in task.files.items() if path not in visible}
    assert not all(result.passed for result in run_tests(sources, visible).values())
    after = repaired(task, tmp_path)
    sources = {path: text for path, text in after.items() if path not in visible}
    assert all(result.passed for result in run_tests(sources, visible).values())


@pytest.mark.parametrize("task", SAMPLE, ids=lambda task: task.task_id)
def test_issue_shows_a_failing_call_and_not_the_repair(task: GeneratedTask) -> None:
    added = [
        line[1:].strip()
        for line in task.gold_patch.splitlines()
        if line.startswith("+") and not line.startswith("+++")
    ]
    assert f"{task.function}(" in task.instruction
    assert len(added) == 1
    assert added[0] not in task.instruction
    assert added[0].removeprefix("return ") not in task.instruction
    title, empty, body = task.instruction.split("\n")
    assert title
    assert not empty
    assert body.endswith(".")


def test_hidden_tests_are_not_among_the_agents_files() -> None:
    for task in SAMPLE:
        assert not set(task.hidden_tests) & set(task.files)


def test_number_names_the_same_task_whatever_was_made_before() -> None:
    first = make_task("heldout", 40)
    build_repository.cache_clear()
    make_task("train", 3)
    assert make_task(Split.HELDOUT, 40) == first


def test_another_process_makes_the_same_task() -> None:
    code = "from swe_eval.generate import make_task; print(repr(make_task('train', 17)))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {repr(make_task("train", 17)) + "\n"}


def test_kinds_take_turns() -> None:
    kinds = collections.Counter(make_task("heldout", index).kind for index in range(130))
    assert kinds == dict.fromkeys(GRAMMAR_KINDS, 10)


def test_splits_share_nothing() -> None:
    parts = {split.value: [make_task(split, index) for index in range(150)] for split in Split}
    counts = check_disjoint(parts)
    assert counts["heldout"]["task"] == 150
    assert counts["heldout"]["function"] > 150


def test_overlap_is_named() -> None:
    with pytest.raises(SplitOverlapError, match=r"one and two share .* task"):
        check_disjoint({"one": SAMPLE[:2], "two": SAMPLE[1:3]})
    # The second bug of a repository: another task, but the same repository.
    first, second = make_task("train", 0), make_task("train", 1)
    assert first.repository == second.repository
    with pytest.raises(SplitOverlapError, match="repository"):
        check_disjoint({"one": [first], "two": [second]})


def test_task_is_found_by_its_id() -> None:
    task = make_task("heldout", 12)
    assert task_at(task.task_id) == task
    for wrong in ("nowhere-00001-off-by-one", "train-x", task.task_id + "x", ""):
        with pytest.raises(ValueError, match="no generated task"):
            task_at(wrong)
    with pytest.raises(ValueError, match="from 0"):
        make_task("train", -1)


def test_every_kind_has_several_templates_and_every_template_a_kind() -> None:
    used: set[str] = set()
    for kind in GRAMMAR_KINDS:
        templates = templates_for(kind)
        assert len(templates) >= 2, kind
        used.update(template.verb for template in templates)
    assert used == {template.verb for template in TEMPLATES}


def test_correct_functions_never_raise_and_answers_stay_short() -> None:
    rng = random.Random(5)
    for template in TEMPLATES:
        for _ in range(20):
            spec = draw_function(rng, Split.TRAIN, template)
            assert len(spec.arguments) >= 4
            assert not any(result.startswith("raises") for result in spec.expected)
            assert max(map(len, spec.expected)) <= 24


def test_issue_about_an_exception_reads_well() -> None:
    text = write_issue(
        random.Random(0), function="f", call="f(1)", got="raises TypeError", want="2"
    )
    assert "raises TypeError" in text
    assert "gives raises" not in text
