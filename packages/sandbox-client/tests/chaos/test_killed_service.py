# ruff: noqa: ASYNC240 -- these tests look at the host itself
"""SIGKILL of the service while a hundred calls are in flight, again and again on one state folder.

After each death nothing may be left (processes, mounts, cgroups, files), and every call has to have
ended in a result or a typed error within its deadline.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from sandbox_client import EnvironmentTree, Sandbox, SandboxClient, ServiceError, Snapshot
from sandbox_client.testing.leftovers import leftovers, processes_of, service_cgroups

StartService = Callable[..., Any]

CALLERS = 100
CALL_S = 4.0
SLACK_S = 10.0
"""What a loaded machine may add to a deadline before it counts as missed."""

COMMANDS = (
    "true",
    "sleep 30",
    "(setsid sleep 30 &) ; setsid sleep 30 & echo started",
    "head -c 30000000 /dev/zero",
    "python -c 'import time; time.sleep(30)'",
    "i=0; while [ $i -lt 300 ]; do i=$((i+1)); echo $i > file-$i; done; cat shop.py",
)


class Round:
    """One life of the service, and the calls that it did not survive."""

    def __init__(self, client: SandboxClient, tree: EnvironmentTree, chosen: random.Random) -> None:
        self._client = client
        self._tree = tree
        self._chosen = chosen
        self.ended: Counter[str] = Counter()
        self.dead = False

    async def caller(self, number: int) -> None:
        """Creates, runs, kills, snapshots and forks until the service is dead."""
        while not self.dead:
            sandbox = await self._call("create", self._client.create(self._tree), CALL_S)
            if isinstance(sandbox, Sandbox):
                await self._use(sandbox, number)

    async def _use(self, sandbox: Sandbox, number: int) -> None:
        chosen = self._chosen
        runs = [
            self._call("exec", sandbox.run(chosen.choice(COMMANDS), timeout_s=3), 3 + CALL_S)
            for _ in range(chosen.randrange(3))
        ]
        if chosen.random() < 0.3:
            # Ends while its commands still run.
            runs.append(self._call("kill", self._later(sandbox), CALL_S + 1))
        await asyncio.gather(*runs)
        if number % 10 == 0:
            snapshot = await self._call("snapshot", sandbox.snapshot(), CALL_S)
            if isinstance(snapshot, Snapshot):
                await self._call("fork", self._client.create(snapshot=snapshot), CALL_S)
        elif number % 10 == 1:
            tree = EnvironmentTree({f"{number}": chosen.randbytes(200_000)})
            await self._call("put", self._client.put_environment(tree), 2 * CALL_S)
        await self._call("kill", sandbox.destroy(), CALL_S)

    async def _later(self, sandbox: Sandbox) -> bool:
        await asyncio.sleep(self._chosen.uniform(0, 0.3))
        return await sandbox.destroy()

    async def _call(self, what: str, call: Awaitable[Any], deadline_s: float) -> Any:
        """Ends in a result, a typed error, or this test's failure."""
        try:
            async with asyncio.timeout(deadline_s + SLACK_S):
                found = await call
        except ServiceError as error:
            self.ended[f"{what} refused"] += 1
            self.ended["untyped"] += type(error) is ServiceError
            return error
        self.ended[what] += 1
        return found


async def eventually_gone(state_dir: Path) -> None:
    end = time.monotonic() + 20
    while left := processes_of(state_dir):
        if time.monotonic() > end:
            lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
            raise AssertionError(f"processes outlived their service: {lines}")
        await asyncio.sleep(0.02)


async def rounds(running: Any, repository: EnvironmentTree, count: int) -> None:
    chosen = random.Random(20)
    ended: Counter[str] = Counter()
    for _ in range(count):
        async with running.client(call_timeout_s=CALL_S, lease_s=20.0) as client:
            await client.put_environment(repository)
            one = Round(client, repository, chosen)
            async with asyncio.TaskGroup() as group:
                callers = [group.create_task(one.caller(number)) for number in range(CALLERS)]
                await asyncio.sleep(chosen.uniform(0.2, 1.2))
                # What is looked for afterwards can be seen while it is there.
                assert processes_of(running.state_dir)
                assert service_cgroups(running.state_dir)
                running.kill()
                one.dead = True
                await asyncio.gather(*callers)
            ended += one.ended
            for sandbox in client._sandboxes.values():
                sandbox.gone = True
            client._connected.snapshot_ids.clear()
        # Processes end with their service; the rest is its successor's to find.
        await eventually_gone(running.state_dir)
        running.start()
        left = leftovers(running.state_dir)
        assert [one for one in left if not one.startswith("process ")] == []
    assert ended["untyped"] == 0, ended
    # It was killed in the midst of all of these.
    assert {"create refused", "exec refused", "kill refused"} <= ended.keys(), ended
    assert {"create", "exec", "kill"} <= ended.keys(), ended
    async with running.client() as client, await client.create(repository) as sandbox:
        assert (await sandbox.run("echo well")).stdout == "well\n"
    assert running.stop() == 0
    assert leftovers(running.state_dir) == []


async def test_a_killed_service_leaves_nothing_and_no_call_hanging(
    start_service: StartService, repository: EnvironmentTree
) -> None:
    await rounds(start_service("pool.sandboxes=6"), repository, 2)


@pytest.mark.slow
@pytest.mark.timeout(3000)
async def test_fifty_killed_services_leave_nothing_and_no_call_hanging(
    start_service: StartService, repository: EnvironmentTree
) -> None:
    await rounds(start_service("pool.sandboxes=6"), repository, 50)
