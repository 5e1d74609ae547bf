from __future__ import annotations

import random
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from swe_eval.generate import GeneratedTask, make_task
from tailrace_cli.demo.expert import SUBMIT, Explorer, ExplorerStyle, plausible_edits

THOROUGH = ExplorerStyle(test_probability=1.0, retry_probability=1.0)


def lines_of(text: str, names: list[str], numbers: list[str]) -> set[str]:
    return {line for choice in plausible_edits(text, names, numbers) for line in choice.lines}


class Workspace:
    """Runs commands for real, as an agent's sandbox would."""

    def __init__(self, task: GeneratedTask, folder: Path) -> None:
        self.folder = folder
        for path, text in task.files.items():
            (folder / path).write_text(text, encoding="utf-8")

    def run(self, command: str) -> str:
        done = subprocess.run(
            shlex.split(command),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=30,
        )
        return done.stdout.rstrip("\n")


def attempt(task: GeneratedTask, folder: Path, seed: int) -> Iterator[tuple[str, str]]:
    workspace = Workspace(task, folder)
    explorer = Explorer(task.instruction, random.Random(seed), THOROUGH)
    observation: str | None = None
    for _ in range(8):
        command = explorer.next_command(observation)
        if command == SUBMIT:
            yield command, ""
            return
        observation = workspace.run(command)
        yield command, observation


@pytest.mark.parametrize("number", range(6))
def test_commands_work_without_a_shell_and_end_with_submit(number: int, tmp_path: Path) -> None:
    task = make_task("train", number)
    steps = list(attempt(task, tmp_path, number))
    commands = [command for command, _ in steps]
    assert commands[0] == f"grep -rn -A3 'def {task.function}'"
    assert commands[1].startswith("sed -i ")
    assert commands[2] == f"python test_{task.module}"
    assert commands[-1] == SUBMIT
    assert steps[0][1].startswith(f"{task.module}:")
    assert all(not output for command, output in steps if command.startswith("sed"))
    changed = (tmp_path / task.module).read_text(encoding="utf-8")
    assert changed.count("\n") == task.files[task.module].count("\n")
    others = {path for path in task.files if path != task.module}
    assert all((tmp_path / p).read_text(encoding="utf-8") == task.files[p] for p in others)


def test_same_seed_same_attempt() -> None:
    listing = "a.py:1:def add_bedo(a, b):\na.py-2-    return a - b"

    def commands(seed: int) -> list[str]:
        explorer = Explorer("Bug in add_bedo\n\nadd_bedo(1, 2) gives -1.", random.Random(seed))
        return [explorer.next_command(output) for output in (None, listing, "", "no", "")]

    assert commands(3) == commands(3)
    assert len({tuple(commands(seed)) for seed in range(8)}) > 1


def test_passing_test_ends_the_attempt() -> None:
    explorer = Explorer("add_bedo is broken", random.Random(0), THOROUGH)
    explorer.next_command(None)
    explorer.next_command("a.py:1:def add_bedo(a, b):\na.py-2-    return a - b")
    assert explorer.next_command("") == "python test_a.py"
    assert explorer.next_command("ok") == SUBMIT


def test_retry_changes_the_same_line_in_another_way() -> None:
    explorer = Explorer("add_bedo is broken", random.Random(0), THOROUGH)
    explorer.next_command(None)
    edits = [explorer.next_command("a.py:1:def add_bedo(a, b):\na.py-2-    return a - b")]
    for _ in range(2):
        explorer.next_command("")
        edits.append(explorer.next_command("add_bedo(1, 2) gives 5, expected 3"))
    assert len(set(edits)) == 3
    assert all(edit.startswith("sed -i '2c\\    return ") for edit in edits)
    explorer.next_command("")
    assert explorer.next_command("add_bedo(1, 2) gives 5, expected 3") == SUBMIT


def test_function_that_is_not_found_is_given_up() -> None:
    explorer = Explorer("add_bedo is broken", random.Random(0))
    explorer.next_command(None)
    assert explorer.next_command("") == SUBMIT
    assert Explorer("it does not work", random.Random(0)).next_command(None) == SUBMIT


@pytest.mark.parametrize(
    ("broken", "repaired"),
    [
        ("    return a - b", "    return a + b"),
        ("    return b - a", "    return a - b"),
        ("    left = b - a", "    left = a - b"),
        ("    return a + a", "    return a + b"),
        ("    return a < 12", "    return a <= 12"),
        ("    return a < 12", "    return a < 40"),
        ("    return a < b or a > c", "    return a < b and a > c"),
        ("    return a + b", "    return a + b - c"),
        ("    return a < b", "    return a < b and b < c"),
        ("    return b if a > b else a", "    return a if a > b else b"),
        ("    return min(a, b)", "    return max(a, b)"),
        ("    return a - b", "    return abs(a - b)"),
        ("    return items", "    return sorted(items)"),
        ("    return len(items)", "    return len(set(items))"),
        ("    return len(items) + 1", "    return len(items)"),
        ("    return items[:a - 1]", "    return items[:a]"),
        ("    return items[a:]", "    return items[:a]"),
        ("    return items[:-a]", "    return items[-a:]"),
        ("    total = 1", "    total = 0"),
        ("        total *= e", "        total += e"),
        ("    for i in range(1, a + 1):", "    for i in range(1, a):"),
    ],
)
def test_every_kind_of_repair_can_be_guessed(broken: str, repaired: str) -> None:
    assert repaired in lines_of(broken, ["a", "b", "c", "items"], ["40", "3"])


def test_no_edit_leaves_the_line_as_it_is() -> None:
    for text in ("    return a + b", "    return items[:a]", "    total = 0"):
        assert text not in lines_of(text, ["a", "b", "items"], ["1"])


def test_most_repairs_of_real_tasks_can_be_guessed() -> None:
    guessable = 0
    for number in range(130):
        task = make_task("train", number)
        old, new = (
            next(
                line[1:]
                for line in task.gold_patch.splitlines()
                if line.startswith(sign) and not line.startswith(sign * 3)
            )
            for sign in "-+"
        )
        header = next(
            line
            for line in task.files[task.module].splitlines()
            if line.startswith(f"def {task.function}(")
        )
        names = header.partition("(")[2].rstrip("):").split(", ")
        guessable += new in lines_of(old, [*names, "e", "i", "total"], ["30"])
    assert guessable > 100
