# ruff: noqa: ASYNC240 -- these tests look at the host itself
"""What the back-end `local` alone promises: its refusals, its user, its processes' ends."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from sandbox_client import (
    EnvironmentRef,
    EnvironmentTree,
    Sandbox,
    SandboxClient,
    SandboxGone,
    SandboxLimits,
    WrongRequest,
)
from sandbox_client.testing.leftovers import service_cgroups
from sandbox_client.testing.service import RunningService
from service_kit.errors import ServiceError

StartService = Callable[..., RunningService]


async def eventually(check: Callable[[], bool], what: str) -> None:
    for _ in range(200):
        if check():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(what)


def descendants(pid: int) -> set[int]:
    listing = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    parents = {int(p): int(pp) for p, pp in (line.split() for line in listing.splitlines())}
    found: set[int] = set()
    grew = {pid}
    while grew:
        grew = {p for p, pp in parents.items() if pp in grew} - found
        found |= grew
    return found


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.parametrize(
    ("environment", "limits", "match"),
    [
        (EnvironmentRef(image="python:3.11"), SandboxLimits(), "folder trees"),
        (EnvironmentRef(tree_digest="x"), SandboxLimits(network=True), "network"),
    ],
)
async def test_what_namespaces_of_this_host_cannot_give_is_refused(
    client: SandboxClient, environment: EnvironmentRef, limits: SandboxLimits, match: str
) -> None:
    with pytest.raises(WrongRequest, match=match):
        await client.create(environment, limits=limits)


async def test_there_are_no_images_to_fetch(client: SandboxClient) -> None:
    with pytest.raises(WrongRequest, match="pulls no images"):
        await client.prefetch_images(["python:3.11"])


async def test_the_user_has_a_name(sandbox: Sandbox) -> None:
    assert (await sandbox.run("id -un; stat -c %U shop.py")).stdout == "agent\nagent\n"


async def test_nothing_of_a_killed_service_runs_on(
    start_service: StartService, repository: EnvironmentTree
) -> None:
    running = start_service()
    async with running.client(call_timeout_s=10) as client:
        sandboxes = [await client.create(repository) for _ in range(3)]
        await sandboxes[0].run("(setsid sleep 711 &) ; sleep 712 &")
        pids = descendants(running.pid)
        assert len(pids) >= 6
        calls = [asyncio.create_task(s.run("sleep 713")) for s in sandboxes]
        await asyncio.sleep(0.2)
        running.kill()
        for call in calls:
            with pytest.raises(ServiceError):
                await call
    await eventually(lambda: not any(map(is_alive, pids)), "processes outlived their service")
    assert len(service_cgroups(running.state_dir)) > 2


async def test_a_stopped_service_cleans_up_behind_itself(
    start_service: StartService, repository: EnvironmentTree
) -> None:
    running = start_service()
    async with running.client() as client:
        sandbox = await client.create(repository)
        await sandbox.run("sleep 721 &")
        pids = descendants(running.pid)
        assert running.stop() == 0
        assert not any(map(is_alive, pids))
        assert service_cgroups(running.state_dir) == []
        assert "tailrace" not in Path("/proc/self/mounts").read_text()
        sandbox.gone = True


async def test_a_killed_fork_server_is_replaced(
    start_service: StartService, repository: EnvironmentTree
) -> None:
    running = start_service()
    async with running.client() as client:
        sandbox = await client.create(repository)
        call = asyncio.create_task(sandbox.run("sleep 731"))
        await asyncio.sleep(0.2)
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
        os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
        with pytest.raises(SandboxGone):
            await call
        async with await client.create(repository) as fresh:
            assert (await fresh.run("python -c 'print(6 * 7)'")).stdout == "42\n"
