"""Arguments in, exit codes and messages out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tailrace_cli.doctor
from tailrace_cli.cli import app
from tailrace_cli.demo.folder import RunFolder
from tailrace_cli.demo.options import DemoOptions
from tailrace_cli.doctor import Finding, Status
from tailrace_cli.stack.health import free_ports
from typer.testing import CliRunner


def tailrace(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr, with line ends taken out of the messages."""
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def free_stack() -> list[str]:
    names = ("sandbox", "eval", "weights", "rollout", "trainer")
    *ports, engine = free_ports(len(names) + 1)
    pairs = [f"{n}=127.0.0.1:{p}" for n, p in zip(names, ports, strict=True)]
    return [part for pair in (*pairs, f"engine_port={engine}") for part in ("--var", pair)]


def test_a_run_never_overwrites_a_folder(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    code, _, message = tailrace("demo", "--out", str(tmp_path))
    assert code == 2
    assert "exists and is not empty" in message
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]
    assert (tmp_path / "precious").read_text() == "x"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--resume", "{here}/none"], "holds no demo run"),
        (["--resume", "{here}/a", "--out", "{here}/b"], "leave out --out"),
        (["--out", "{here}/run", "--set", "rl.batch_group=4"], "did you mean rl.batch_groups?"),
        (["--out", "{here}/run", "--set", "sft.steps=[a/b]"], "sft.steps"),
        (["--out", "{here}/run", "--set", "nobody.x=1"], "nothing is named 'nobody'"),
        (["--out", "{here}/run", "--set", "trainer"], "is no setting"),
        (["--out", "{here}/run", "--steps", "0"], "steps: Input should be greater"),
        (["--out", "{here}/run", "--minutes", "-1"], "minutes: Input should be greater"),
        (["--out", "{here}/run", "--control", "luck"], "luck"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2_and_leaves_no_folder(
    tmp_path: Path, arguments: list[str], expected: str
) -> None:
    code, _, message = tailrace("demo", *(a.format(here=tmp_path) for a in arguments))
    assert code == 2
    assert expected in message
    assert "Traceback" not in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["up", "status", "doctor"])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--stack", "none.toml"], "no stack file none.toml"),
        (["--var", "nothing"], "is no variable"),
        (["--var", "nothing=1"], "has no variable nothing"),
    ],
)
def test_a_wrong_stack_is_refused_by_every_command(
    command: str, arguments: list[str], expected: str
) -> None:
    code, _, message = tailrace(command, *arguments)
    assert code == 2
    assert expected in message


def test_status_of_nothing_fails_and_says_what_does_not_answer() -> None:
    variables = free_stack()
    code, output, _ = tailrace("status", *variables)
    assert code == 1
    assert "6 of 6 not serving: sandbox, eval, weights, engine, rollout, trainer" in output
    code, output, _ = tailrace("status", "--json", *variables)
    assert code == 1
    report = json.loads(output)
    assert report["healthy"] is False
    assert {s["error"] for s in report["services"]} == {"does not answer"}


@pytest.mark.parametrize(
    ("finding", "code"),
    [
        (Finding("a", Status.OK, "fine"), 0),
        (Finding("a", Status.WARNING, "slow", "buy another"), 0),
        (Finding("a", Status.PROBLEM, "none", "get one"), 1),
    ],
)
def test_doctor_fails_for_problems_alone(
    monkeypatch: pytest.MonkeyPatch, finding: Finding, code: int
) -> None:
    monkeypatch.setattr(tailrace_cli.doctor, "examine", lambda stack: [finding])
    found, output, _ = tailrace("doctor", "--json")
    assert found == code
    assert json.loads(output) == {
        "passed": code == 0,
        "findings": [
            {
                "check": "a",
                "status": finding.status.value,
                "found": finding.found,
                "fix": finding.fix,
            }
        ],
    }
    found, output, _ = tailrace("doctor")
    assert found == code
    assert finding.found in output
    assert finding.fix in output


def test_report_writes_the_page_of_a_recorded_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", DemoOptions(seed=5), lambda: 1.0)
    folder.record("started", seed=5, steps_total={"sft": 1, "rl": 1}, staleness_bound=2)
    folder.close()
    code, output, _ = tailrace("report", str(tmp_path / "run"))
    assert code == 0
    page = Path(output.strip())
    assert page == tmp_path / "run" / "report.html"
    assert "<html" in page.read_text()


def test_report_of_nothing_is_refused(tmp_path: Path) -> None:
    code, _, message = tailrace("report", str(tmp_path))
    assert code == 2
    assert "holds no demo run" in message


def test_help_is_quick_to_come_and_needs_no_model_library() -> None:
    script = (
        "import sys; from tailrace_cli.cli import app\n"
        "from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
