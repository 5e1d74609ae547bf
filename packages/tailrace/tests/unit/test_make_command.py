"""`tailrace tasks make`: what it refuses before anything is started, with exit code 2."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from swe_eval.generate import KINDS
from tailrace_cli.cli import app
from tailrace_cli.tasks.making import checked_kinds
from typer.testing import CliRunner


def make(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["tasks", "make", *arguments], env={"COLUMNS": "400"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stderr


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop/shop.py").write_text("def add(a, b):\n    return a + b\n")
    return tmp_path / "shop"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", "absent"], "absent is not there"),
        (["--from", "shop", "--kinds", "operator_change,off_by_two"], "unknown off_by_two; known:"),
        (["--from", "shop", "--python", "absent/bin/python"], "expected an interpreter"),
        (["--from", "shop", "--sandbox", "nowhere"], "--sandbox"),
        (["--from", "shop", "--llm-url", "http://m/v1"], "--llm-url and --llm-model"),
        (["--from", "shop", "--llm-url", "foo", "--llm-model", "m"], "http:// or https://"),
        (["--from", "shop", "--count", "0"], "count"),
    ],
)
def test_wrong_input_is_refused_and_nothing_is_started(
    shop: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(shop.parent)
    code, message = make("out", *arguments)
    assert code == 2
    assert words in " ".join(message.split())


def test_a_file_in_place_of_the_folder_and_a_second_making_are_refused(
    shop: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for out in ("file", "file/below"):
        code, message = make(str(tmp_path / out), "--from", str(shop))
        assert (code, "expected a folder for tasks" in message) == (2, True)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    code, message = make(str(tmp_path), "--from", str(shop))
    os.close(descriptor)
    assert (code, "another `tasks make` writes there" in message) == (2, True)


def test_an_environment_with_a_copy_of_the_repository_is_refused(
    shop: Path, tmp_path: Path
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "shop.py").write_text("")
    python = tmp_path / "python"
    said = f'{{"version": "3.11", "found": {{"pytest": "9"}}, "folder": "{packages}"}}'
    python.write_text(f"#!/bin/sh\necho '{said}'\n")
    python.chmod(0o755)
    code, message = make(str(tmp_path / "out"), "--from", str(shop), "--python", str(python))
    assert code == 2
    assert "holds shop.py, as the repository does" in " ".join(message.split())


def test_kinds_are_named_one_by_one_or_by_commas() -> None:
    assert checked_kinds(["off_by_one, slice_flip", "remove_loop"]) == (
        "off_by_one",
        "slice_flip",
        "remove_loop",
    )
    assert checked_kinds(()) == KINDS
