from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

PROGRAM = '''
import asyncio, sys
from functools import partial
import grpc
from service_kit import *

class EchoConfig(Config):
    server: ServerConfig = ServerConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    fail: str = ""
    """What goes wrong, for tests."""

async def echo(request, context):
    return request

async def slow(request, context):
    yield b"started"
    await asyncio.sleep(float(request))
    yield b"finished"

def register(server):
    handlers = {
        "Echo": grpc.unary_unary_rpc_method_handler(echo),
        "Slow": grpc.unary_stream_rpc_method_handler(slow),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("e.v1.Echo", handlers),))

async def ticker():
    try:
        await asyncio.Event().wait()
    finally:
        print("ticker stopped", flush=True)

async def broken():
    await asyncio.sleep(0.05)
    raise StartupError("the ledger is gone")

async def run(config):
    if config.fail == "checkpoint":
        raise StartupError("no checkpoint at /nowhere; start without --resume")
    if config.fail == "disk":
        raise OSError(28, "No space left on device", "/data/ledger.db")
    if config.fail == "service":
        raise NotFound("no such data set 'x'")
    if config.fail == "bug":
        raise KeyError("bug")
    background = [ticker()] + ([broken()] if config.fail == "background" else [])
    await run_until_signal(Server(config.server, [Service("e.v1.Echo", register)]), background)
    print("ended", flush=True)

app = service_app("echo-service", EchoConfig, run, summary="Echoes.")
app()
'''


@dataclass
class Program:
    """The service as a process of its own."""

    folder: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def command(self, *arguments: str) -> list[str]:
        script = self.folder / "echo_service.py"
        script.write_text(PROGRAM)
        return [sys.executable, str(script), *arguments]

    def run(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, **environ},
        )

    def serve(self, *arguments: str) -> tuple[subprocess.Popen[str], str]:
        """Start serving and return the process and its address."""
        file = self.folder / "address"
        process = subprocess.Popen(
            self.command("serve", "--set", f"server.address_file={file}", *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(process)
        ends = time.monotonic() + 60
        while not file.exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < ends
            time.sleep(0.02)
        return process, file.read_text().strip()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    made = Program(tmp_path)
    yield made
    for process in made.running:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_with_code_0(program: Program, number: signal.Signals) -> None:
    process, address = program.serve()
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        reply = health.Check(health_pb2.HealthCheckRequest(service="e.v1.Echo"), timeout=30)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        slow: Any = channel.unary_stream("/e.v1.Echo/Slow")
        stream = slow(b"0.5")
        assert next(stream) == b"started"
        process.send_signal(number)
        assert list(stream) == [b"finished"]
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.splitlines() == ["ticker stopped", "ended"]
    assert f"{number.name}: draining" in err


def test_a_second_signal_ends_at_once(program: Program) -> None:
    process, address = program.serve("--set", "server.drain_grace_s=600")
    with grpc.insecure_channel(address) as channel:
        slow: Any = channel.unary_stream("/e.v1.Echo/Slow")
        stream = slow(b"600")
        assert next(stream) == b"started"
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        while "draining" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def _assert_one_message(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in errors[0]


def test_an_unknown_key_ends_with_code_2_and_one_message(program: Program, tmp_path: Path) -> None:
    file = tmp_path / "echo.toml"
    file.write_text('[server]\nbindd = "127.0.0.1:0"\n')
    hint = "closest valid key: 'server.bind'"
    _assert_one_message(program.run("serve", "--config", str(file)), str(file), hint)
    _assert_one_message(program.run("serve", "--set", "server.bindd=x"), "--set", hint)
    variable = "TAILRACE_ECHO_SERVICE__SERVER__BINDD"
    _assert_one_message(program.run("serve", **{variable: "x"}), variable, hint)


def test_a_busy_port_ends_with_code_2_and_one_message(program: Program) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        bind = f"127.0.0.1:{busy.getsockname()[1]}"
        done = program.run("serve", "--set", f"server.bind={bind}")
    _assert_one_message(done, f"cannot listen on {bind}: Address already in use")
    assert "ticker stopped" not in done.stdout


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        ("checkpoint", "no checkpoint at /nowhere; start without --resume"),
        ("disk", "No space left on device: /data/ledger.db"),
        ("service", "no such data set 'x' [NOT_FOUND]"),
        ("background", "the ledger is gone"),
    ],
)
def test_what_an_operator_can_mend_ends_with_code_2(
    program: Program, fail: str, message: str
) -> None:
    _assert_one_message(program.run("serve", "--set", f"fail={fail}"), message)


def test_a_bug_keeps_its_traceback_and_another_code(program: Program) -> None:
    done = program.run("serve", "--set", "fail=bug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "KeyError: 'bug'" in done.stderr


def test_wrong_options_end_with_code_2(program: Program) -> None:
    assert program.run("serve", "--nonsense").returncode == 2
    assert program.run("serve", "--log-level", "loud").returncode == 2
    assert program.run("nonsense").returncode == 2


def test_the_config_command_tells_values_defaults_and_meanings(program: Program) -> None:
    done = program.run(
        "config",
        "--set",
        "server.drain_grace_s=3",
        TAILRACE_ECHO_SERVICE__SERVER__TOKEN="a token nobody may see",
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "server.drain_grace_s = 3.0  (default: 10.0)" in lines
    assert "server.token = ***  (default: null)" in lines
    assert any("Longest time that calls in flight" in line for line in lines)
    assert "nobody" not in done.stdout
