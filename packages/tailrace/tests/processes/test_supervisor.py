"""The supervisor over real processes: order, restart, refusal, drain."""

import asyncio
import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tailrace_cli.stack.health import free_ports
from tailrace_cli.stack.spec import StackSpec, parse_stack
from tailrace_cli.stack.supervisor import StackError, Supervisor

SERVICE = """
import http.server, os, sys, tomllib
config = tomllib.load(open(sys.argv[sys.argv.index("--config") + 1], "rb"))
print("starting", config, flush=True)
if "refuse" in config:
    sys.exit("error: refused")
if "exit_code" in config:
    raise SystemExit(config["exit_code"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
with open(config["starts"], "a") as log:
    log.write(config["name"] + "\\n")
http.server.HTTPServer(("127.0.0.1", config["port"]), Handler).serve_forever()
"""


@pytest.fixture
def service(tmp_path: Path) -> Path:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "fake_service.py").write_text(textwrap.dedent(SERVICE))
    return tmp_path


def stack(folder: Path, names: dict[str, list[str]], **more: Any) -> StackSpec:
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    return parse_stack(
        {
            "restart": {"backoff_s": 0.05},
            "drain_s": 5,
            "processes": [
                {
                    "name": name,
                    "module": "fake_service",
                    "address": f"http://127.0.0.1:{ports[name]}",
                    "after": after,
                    "environment": {"PYTHONPATH": str(folder / "lib")},
                    "start_timeout_s": 30,
                    "config": {
                        "name": name,
                        "port": ports[name],
                        "starts": str(folder / "starts"),
                        **more,
                    },
                }
                for name, after in names.items()
            ],
        },
        source="test",
        state_dir=folder / "state",
    )


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_processes_start_in_order_and_all_end_with_the_stack(service: Path) -> None:
    async with Supervisor(stack(service, {"second": ["first"], "first": []})).running() as running:
        assert (service / "starts").read_text().split() == ["first", "second"]
        pids = [p.pid for p in running.statuses() if p.pid]
        assert {p.state for p in running.statuses()} == {"healthy"}
        assert all(alive(pid) for pid in pids)
    assert not any(alive(pid) for pid in pids)


async def test_a_killed_process_is_started_again(service: Path) -> None:
    async with Supervisor(stack(service, {"only": []})).running() as running:
        before = running.statuses()[0]
        assert before.pid
        os.kill(before.pid, signal.SIGKILL)

        def restarted() -> bool:
            now = running.statuses()[0]
            return now.restarts == 1 and now.state == "healthy"

        async with asyncio.timeout(20):
            while not restarted():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert running.statuses()[0].pid != before.pid


async def test_a_process_that_refuses_its_config_ends_the_stack_with_exit_code_2(
    service: Path,
) -> None:
    with pytest.raises(StackError, match="exit code 2") as caught:
        async with Supervisor(stack(service, {"only": []}, exit_code=2)).running():
            pytest.fail("must not start")
    assert caught.value.exit_code == 2


async def test_the_end_of_a_log_is_part_of_the_error(service: Path) -> None:
    with pytest.raises(StackError, match="error: refused"):
        async with Supervisor(stack(service, {"only": []}, refuse=True)).running():
            pytest.fail("must not start")


async def test_a_busy_port_is_refused_before_anything_starts(service: Path) -> None:
    spec = stack(service, {"first": [], "second": []})
    async with Supervisor(spec).running():
        with pytest.raises(StackError, match="cannot listen") as caught:
            async with Supervisor(spec).running():
                pytest.fail("must not start")
    assert caught.value.exit_code == 2
    assert (service / "starts").read_text().split().count("first") == 1


async def test_an_error_in_the_body_still_stops_every_process(service: Path) -> None:
    pids: list[int] = []

    async def body_fails() -> None:
        async with Supervisor(stack(service, {"only": []})).running() as running:
            pids.extend(p.pid for p in running.statuses() if p.pid)
            raise KeyError

    with pytest.raises(KeyError):
        await body_fails()
    assert pids
    assert not any(alive(pid) for pid in pids)


async def test_starting_a_process_runs_nothing_in_a_forked_copy_of_the_supervisor(
    service: Path,
) -> None:
    """The copy has none of gRPC's threads: code in it can hang or abort before the program runs."""
    forks: list[int] = []
    os.register_at_fork(before=lambda: forks.append(os.getpid()))
    async with Supervisor(stack(service, {"only": []})).running():
        assert forks == []


SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from tailrace_cli.stack import Supervisor, load_stack
async def main():
    async with Supervisor(load_stack(Path(sys.argv[1]))).running() as running:
        print(*[p.pid for p in running.statuses()], flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_no_process_outlives_a_supervisor_that_is_killed(service: Path) -> None:
    spec = stack(service, {"first": [], "second": []})
    file = service / "stack.toml"
    file.write_text(tomli_w.dumps(spec.model_dump(mode="json")))
    supervisor = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SUPERVISOR, str(file), stdout=asyncio.subprocess.PIPE
    )
    assert supervisor.stdout is not None
    pids = [int(word) for word in (await supervisor.stdout.readline()).split()]
    assert len(pids) == 2
    assert all(alive(pid) for pid in pids)
    supervisor.kill()
    await supervisor.wait()
    async with asyncio.timeout(20):
        while any(alive(pid) for pid in pids):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
