"""Idle sandboxes made ahead, with a real service."""

import asyncio
from collections.abc import Callable
from typing import Any

from sandbox_client import EnvironmentTree, SandboxClient, SandboxLimits
from sandbox_client.testing.backends import BackendUnderTest

StartService = Callable[..., Any]


async def idle(client: SandboxClient) -> float:
    return {s.name: s.in_use for s in (await client.status()).limiters}["pool_sandboxes"]


async def idle_becomes(client: SandboxClient, count: int) -> None:
    for _ in range(400):
        if await idle(client) == count:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{await idle(client)} sandboxes are idle, expected {count}")


async def test_a_create_takes_an_idle_sandbox_that_is_like_a_new_one(
    start_service: StartService, repository: EnvironmentTree
) -> None:
    running = start_service("pool.sandboxes=4", "pool.per_environment=3", "limits.sandboxes=2")
    async with running.client() as client:
        first = await client.create(repository)
        # Idle ones are not the client's, and do not count as its sandboxes.
        await idle_becomes(client, 3)
        assert len(await client.list()) == 1
        async with await client.create(repository, labels={"a": "b"}) as second:
            assert (await second.run("cat pkg/data.txt; ls -A /tmp")).stdout == "one\ntwo\nthree\n"
            assert {info.sandbox_id for info in await client.list()} == {first.id, second.id}
            await second.run("echo >> shop.py")
            assert b"shop.py" in await second.diff()
            await idle_becomes(client, 3)
        # Another kind is not served from these.
        async with await client.create(repository, limits=SandboxLimits(pids=20)) as third:
            assert (await third.run("echo ok")).stdout == "ok\n"
    assert running.stop() == 0


async def test_what_nobody_asks_for_any_more_is_ended(
    backend: BackendUnderTest, start_service: StartService, repository: EnvironmentTree
) -> None:
    running = start_service("pool.sandboxes=2", f"pool.demand_s={0.5 * backend.patience}")
    async with running.client() as client:
        await (await client.create(repository)).destroy()
        await idle_becomes(client, 2)
        await idle_becomes(client, 0)
