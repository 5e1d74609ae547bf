"""`tailrace up` with the shipped stack file on free ports, as a user runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tailrace_cli.cli import app
from tailrace_cli.stack.health import free_ports
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[4]
STACK = ROOT / "infra" / "local" / "stack.toml"
NAMES = ("sandbox", "eval", "weights", "rollout", "trainer")
START_S = 150
DRAIN_S = 60

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes are made by root")


def tailrace(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a short command."""
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    return done.exit_code, done.stdout, done.stderr


def variables() -> list[str]:
    *ports, engine = free_ports(len(NAMES) + 1)
    pairs = [f"{name}=127.0.0.1:{port}" for name, port in zip(NAMES, ports, strict=True)]
    return [part for pair in (*pairs, f"engine_port={engine}") for part in ("--var", pair)]


def session_members(leader: int) -> set[int]:
    """Processes of a process and of its children's sessions."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(stat[1]) == leader:
                found.add(int(entry.name))
    return found


class Up:
    """The command as a process, and what it has printed."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.state = folder / "state"
        self.output = folder / "output"
        self.variables = variables()
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tailrace_cli", "up"),
                    *("--stack", str(STACK), "--state", str(self.state)),
                    *self.variables,
                    *arguments,
                ],
                stdout=output,
                stderr=output,
            )

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + START_S
        while text not in self.output.read_text():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.1)

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(DRAIN_S)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Up]:
    up = Up(tmp_path)
    try:
        up.wait_for("ready")
        yield up
    finally:
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait()


def test_a_stack_comes_up_shows_itself_and_drains_on_sigterm(running: Up) -> None:
    services = session_members(running.process.pid)
    assert len(services) == 6

    for way in (["--stack", str(running.state / "resolved-stack.toml")], running.variables):
        code, output, _ = tailrace("status", "--json", *way)
        assert code == 0, output
        report = json.loads(output)
        assert report["healthy"] is True
        details = {s["name"]: s["details"] for s in report["services"]}
        assert set(details) == {*NAMES, "engine"}
        assert {x["name"]: x["limit"] for x in details["sandbox"]["limiters"]}["sandboxes"] > 0
        assert details["eval"]["tasks"] > 2000
        assert details["rollout"]["engines"][0]["healthy"] is True
        assert details["weights"]["nodes"][0]["engines"][0]["kind"] == "embedded"
        assert details["trainer"]["run"] == "local"
    code, output, _ = tailrace("status", *running.variables)
    assert code == 0
    assert output.count(" serving") == 6

    # A second stack on the same ports is refused, and the first one lives on.
    code, _, message = tailrace("up", "--stack", str(STACK), *running.variables)
    assert code == 2
    assert re.search(r"cannot listen on 127\.0\.0\.1:\d+", message)

    assert running.end(signal.SIGTERM) == 0
    assert "draining" in running.output.read_text()
    assert not [pid for pid in services if Path(f"/proc/{pid}").exists()]
    assert tailrace("status", *running.variables)[0] == 1


def test_an_interrupted_start_leaves_nothing_behind(tmp_path: Path) -> None:
    up = Up(tmp_path)
    deadline = time.monotonic() + START_S
    while not session_members(up.process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    services = session_members(up.process.pid)
    assert up.end(signal.SIGINT) == 0
    assert not [pid for pid in services if Path(f"/proc/{pid}").exists()]


def test_a_service_that_refuses_its_settings_ends_the_start_with_its_own_words(
    tmp_path: Path,
) -> None:
    up = Up(tmp_path, "--set", "eval.grading.colour=red")
    assert up.process.wait(START_S) == 2
    message = up.output.read_text()
    assert "eval ended with exit code 2" in message
    assert "colour" in message
    assert "Traceback" not in message
