"""`tailrace sandbox` against services that live in the test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tailrace.sandbox.v1 import sandbox_service_pb2 as pb
from tailrace.sandbox.v1 import sandbox_service_pb2_grpc as pb_grpc
from tailrace_cli.cli import app
from typer.testing import CliRunner


class FakeService(pb_grpc.SandboxServiceServicer):
    def __init__(self, *sandboxes: tuple[str, str]) -> None:
        self.living = dict(sandboxes)

    def ListSandboxes(self, request: pb.ListSandboxesRequest, context: Any) -> Any:
        return pb.ListSandboxesResponse(
            sandboxes=[
                pb.SandboxInfo(
                    sandbox_id=sandbox_id,
                    owner=owner,
                    labels={"attempt": "[7]"},
                    age_s=61,
                    lease_left_s=30,
                    running_commands=2,
                )
                for sandbox_id, owner in self.living.items()
                if request.owner in ("", owner)
            ]
        )

    def DestroySandbox(self, request: pb.DestroySandboxRequest, context: Any) -> Any:
        existed = self.living.pop(request.sandbox_id, None) is not None
        return pb.DestroySandboxResponse(existed=existed)

    def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> Any:
        limiters = [
            pb.LimiterStatus(name="sandboxes", limit=4, in_use=len(self.living)),
            pb.LimiterStatus(name="snapshots_bytes", limit=2**31, in_use=2**30, waiting=0),
            pb.LimiterStatus(name="starts_per_s", limit=0, in_use=0),
        ]
        return pb.GetStatusResponse(limiters=limiters)


@pytest.fixture
def service() -> Iterator[tuple[FakeService, str]]:
    server = grpc.server(ThreadPoolExecutor(2))
    fake = FakeService(("sb-1", "ann"), ("sb-2", "bob"))  # type: ignore[abstract]
    pb_grpc.add_SandboxServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield fake, f"127.0.0.1:{port}"
    server.stop(None)


def sandbox(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["sandbox", *arguments], env={"COLUMNS": "200"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def test_listings_tell_what_lives_and_for_how_long(service: tuple[FakeService, str]) -> None:
    code, shown, _ = sandbox("ls", "--target", service[1])
    assert code == 0
    (row,) = [line for line in shown.splitlines() if "sb-1" in line]
    assert row.split() == ["sb-1", "sandbox", "ann", "61", "s", "30", "s", "2", "attempt=[7]"]
    code, shown, _ = sandbox("ls", "--target", service[1], "--owner", "bob", "--json")
    [found] = json.loads(shown)
    assert (found["sandbox_id"], found["lease_left_s"], found["labels"]) == (
        "sb-2",
        30,
        {"attempt": "[7]"},
    )
    service[0].living.clear()
    assert "no sandbox is alive" in sandbox("ls", "--target", service[1])[1]


def test_named_sandboxes_are_ended_and_those_that_were_not_there_are_told(
    service: tuple[FakeService, str],
) -> None:
    code, shown, _ = sandbox("kill", "sb-1", "sb-9", "--target", service[1])
    assert code == 1
    assert shown.splitlines() == ["sb-1 ended", "sb-9 was not there"]
    assert list(service[0].living) == ["sb-2"]


def test_all_of_an_owner_are_ended(service: tuple[FakeService, str]) -> None:
    code, shown, _ = sandbox("kill", "--owner", "ann", "--json", "--target", service[1])
    assert (code, json.loads(shown)) == (0, {"sb-1": True})
    assert list(service[0].living) == ["sb-2"]
    assert sandbox("kill", "--all", "--target", service[1])[0] == 0
    assert service[0].living == {}


def test_every_limit_is_shown_with_its_share(service: tuple[FakeService, str]) -> None:
    code, shown, _ = sandbox("df", "--target", service[1])
    assert code == 0
    rows = {line.split()[0]: " ".join(line.split()[2:]) for line in shown.splitlines()[1:]}
    assert rows == {
        "sandboxes": "2 of 4 50%",
        "snapshots_bytes": "1.0 GiB of 2.0 GiB 50%",
        "starts_per_s": "0, no limit",
    }
    [first, *_] = json.loads(sandbox("df", "--json", "--target", service[1])[1])
    assert (first["service"], first["name"], first["limit"]) == ("sandbox", "sandboxes", 4)


def test_the_services_of_a_stack_are_found(
    service: tuple[FakeService, str], tmp_path: Path
) -> None:
    file = tmp_path / "stack.toml"
    file.write_text(
        f'[[processes]]\nname = "box-a"\nmodule = "sandbox_client"\naddress = "grpc://{service[1]}"\n'
    )
    code, shown, _ = sandbox("ls", "--stack", str(file), "--json")
    assert code == 0
    assert [found["service"] for found in json.loads(shown)] == ["box-a", "box-a"]
    file.write_text(
        '[[processes]]\nname = "other"\nmodule = "swe_eval"\naddress = "grpc://127.0.0.1:1"\n'
    )
    code, _, message = sandbox("ls", "--stack", str(file))
    assert code == 2
    assert "has no sandbox service" in message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["kill"], "name the sandboxes"),
        (["kill", "sb-1", "--all"], "not both"),
        (["kill", "sb-1", "--owner", "ann"], "not both"),
        (["ls", "--target", "nonsense"], "--target"),
        (["df", "--stack", "/nowhere.toml"], "no stack file"),
    ],
)
def test_bad_input_is_exit_code_2(arguments: list[str], expected: str) -> None:
    code, _, message = sandbox(*arguments)
    assert code == 2
    assert expected in message


def test_a_service_that_does_not_answer_is_exit_code_1() -> None:
    code, _, message = sandbox("ls", "--target", "127.0.0.1:1")
    assert code == 1
    assert "127.0.0.1:1" in message
