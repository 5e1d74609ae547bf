# ruff: noqa: ASYNC221 -- one test starts a service that refuses to
"""Leases, keys, limits, restarts and faults, with real services that may be killed."""

import asyncio
import subprocess
import sys
from collections.abc import Callable

import pytest
from sandbox_client import (
    EnvironmentRef,
    EnvironmentTree,
    EnvironmentUnknown,
    IdempotencyConflict,
    InjectedFault,
    QuotaExhausted,
    SandboxClient,
    SandboxGone,
    SandboxLimits,
    WrongRequest,
)
from sandbox_client.testing.backends import BackendUnderTest
from sandbox_client.testing.service import RunningService
from service_kit.errors import Reason, ServiceError

StartService = Callable[..., RunningService]


async def test_the_same_key_gives_the_same_sandbox_even_at_the_same_time(
    client: SandboxClient, repository: EnvironmentTree
) -> None:
    await client.put_environment(repository)
    made = await asyncio.gather(*(client.create(repository, key="one") for _ in range(8)))
    assert len({sandbox.id for sandbox in made}) == 1
    with pytest.raises(IdempotencyConflict):
        await client.create(repository, key="one", limits=SandboxLimits(pids=50))
    await made[0].destroy()
    again = await client.create(repository, key="one")
    assert again.id != made[0].id
    await again.destroy()


async def test_an_unknown_environment_is_told_as_such(client: SandboxClient) -> None:
    with pytest.raises(EnvironmentUnknown) as caught:
        await client.create("ab" * 32)
    assert caught.value.reason is Reason.ENVIRONMENT_UNKNOWN
    assert caught.value.metadata["digest"] == "ab" * 32


@pytest.mark.parametrize(
    ("environment", "limits", "match"),
    [
        (EnvironmentRef(tree_digest="x", workdir="/usr/x"), SandboxLimits(), "read-only"),
        (EnvironmentRef(tree_digest="x", workdir="/tmp"), SandboxLimits(), "overlaps"),
        (EnvironmentRef(tree_digest="x", workdir="relative"), SandboxLimits(), "absolute"),
        (EnvironmentRef(tree_digest="x"), SandboxLimits(pids=-1), "negative"),
        (
            EnvironmentRef(tree_digest="x"),
            SandboxLimits(memory_bytes=1 << 26, disk_bytes=1 << 26),
            "three quarters",
        ),
    ],
)
async def test_requests_that_cannot_be_met_are_refused(
    client: SandboxClient, environment: EnvironmentRef, limits: SandboxLimits, match: str
) -> None:
    with pytest.raises(WrongRequest, match=match):
        await client.create(environment, limits=limits)


async def test_the_work_folder_and_variables_are_the_environments(
    client: SandboxClient, repository: EnvironmentTree
) -> None:
    await client.put_environment(repository)
    reference = EnvironmentRef(
        tree_digest=repository.digest,
        workdir="/testbed/repo",
        env={"MODE": "test", "HOME": "/logs"},
    )
    async with await client.create(reference) as sandbox:
        result = await sandbox.run("pwd; echo $MODE $HOME; ls shop.py")
        assert result.stdout == "/testbed/repo\ntest /logs\nshop.py\n"
        await sandbox.run("echo >> shop.py")
        assert b"a/shop.py" in await sandbox.diff()


async def test_a_destroyed_sandbox_is_gone(
    client: SandboxClient, repository: EnvironmentTree
) -> None:
    sandbox = await client.create(repository)
    running = asyncio.create_task(sandbox.run("sleep 700"))
    await asyncio.sleep(0.2)
    assert await sandbox.destroy()
    assert not await client.destroy(sandbox.id)
    with pytest.raises(SandboxGone):
        await running
    for call in (sandbox.run("true"), sandbox.diff(), sandbox.write("x", "y"), sandbox.read("x")):
        with pytest.raises(SandboxGone) as caught:
            await call
        assert not caught.value.retryable
    assert sandbox.gone


async def test_listings_tell_owner_labels_and_age(
    backend: BackendUnderTest, service: RunningService, repository: EnvironmentTree
) -> None:
    async with service.client(owner="alice") as alice, service.client(owner="bob") as bob:
        await alice.create(repository, labels={"attempt": "7"})
        await bob.create(repository)
        (mine,) = await alice.list()
        assert (mine.owner, mine.labels) == ("alice", {"attempt": "7"})
        assert 0 <= mine.age_s < 60
        assert 0 < mine.lease_left_s <= 60
        status = await bob.status()
        assert status.backend == backend.name
        assert status.sandboxes >= 2
        gauges = {limiter.name: limiter for limiter in status.limiters}
        assert gauges["sandboxes"].in_use >= 2
        assert {"commands", "concurrent_starts"} <= gauges.keys()


async def test_a_closing_client_leaves_nothing(
    service: RunningService, repository: EnvironmentTree
) -> None:
    async with service.client(owner="carol") as carol:
        for _ in range(3):
            await carol.create(repository)
    async with service.client(owner="carol") as carol:
        assert await carol.list() == []


async def test_what_nobody_renews_is_reaped(
    service: RunningService, repository: EnvironmentTree
) -> None:
    async with service.client(owner="dave", lease_s=1.0) as dave:
        sandbox = await dave.create(repository)
        # Renewed every third of a second, so it outlives its lease.
        await asyncio.sleep(1.5)
        assert (await sandbox.run("echo alive")).stdout == "alive\n"
        assert dave._renewing is not None
        dave._renewing.cancel()
        for _ in range(100):
            await asyncio.sleep(0.1)
            if not await dave.list():
                break
        with pytest.raises(SandboxGone):
            await sandbox.run("true")


async def test_a_full_service_says_when_to_come_back(
    start_service: StartService, repository: EnvironmentTree
) -> None:
    running = start_service("limits.sandboxes=2", "limits.retry_after_s=0.1")
    async with running.client() as client:
        first = await client.create(repository)
        await client.create(repository)
        with pytest.raises(QuotaExhausted) as caught:
            await client.create(repository, timeout_s=0.5)
        assert caught.value.retryable
        assert caught.value.retry_after_s == pytest.approx(0.1)
        waiting = asyncio.create_task(client.create(repository, timeout_s=20))
        await asyncio.sleep(0.3)
        await first.destroy()
        assert (await (await waiting).run("echo in")).stdout == "in\n"


async def test_injected_faults_are_typed_and_counted_out(
    start_service: StartService, repository: EnvironmentTree
) -> None:
    running = start_service("faults.create_rate=0.5", "faults.exec_rate=0.5", "faults.seed=3")
    async with running.client() as client:
        await client.put_environment(repository)
        creates = await asyncio.gather(
            *(client.create(repository, key=f"k{n}") for n in range(16)), return_exceptions=True
        )
        failed = [error for error in creates if isinstance(error, InjectedFault)]
        made = [sandbox for sandbox in creates if not isinstance(sandbox, BaseException)]
        assert len(failed) + len(made) == 16
        assert 2 < len(failed) < 14
        assert (await client.status()).sandboxes == len(made)
        runs = await asyncio.gather(
            *(made[0].run("true") for _ in range(16)), return_exceptions=True
        )
        assert 2 < sum(isinstance(error, InjectedFault) for error in runs) < 14


async def test_a_killed_service_leaves_nothing_and_its_successor_serves(
    backend: BackendUnderTest, start_service: StartService, repository: EnvironmentTree
) -> None:
    running = start_service()
    async with running.client(call_timeout_s=10) as client:
        sandboxes = [await client.create(repository) for _ in range(2)]
        await sandboxes[0].run("(setsid sleep 711 &) ; sleep 712 &")
        calls = [asyncio.create_task(s.run("sleep 713")) for s in sandboxes]
        await asyncio.sleep(0.2)
        assert backend.leftovers(running.state_dir) != []
        running.kill()
        for call in calls:
            with pytest.raises(ServiceError):
                await call
    running.start()
    assert backend.leftovers(running.state_dir) == []
    async with running.client() as client:
        with pytest.raises(SandboxGone):
            await client.attach(sandboxes[0].id).run("true")
        # Environments are still there: they are on disk.
        assert await client.missing_environments([repository.digest]) == []
        assert (await (await client.create(repository)).run("echo back")).stdout == "back\n"


async def test_a_stopped_service_leaves_nothing(
    backend: BackendUnderTest, start_service: StartService, repository: EnvironmentTree
) -> None:
    running = start_service()
    async with running.client() as client:
        sandbox = await client.create(repository)
        await sandbox.run("sleep 721 &")
        assert backend.leftovers(running.state_dir) != []
        assert running.stop() == 0
        assert backend.leftovers(running.state_dir) == []
        sandbox.gone = True


async def test_one_state_folder_serves_one_service(
    backend: BackendUnderTest, start_service: StartService
) -> None:
    running = start_service()
    settings = (*backend.settings, f"state_dir={running.state_dir}")
    second = subprocess.run(
        [sys.executable, "-m", "sandbox_client", "serve", *(f"--set={s}" for s in settings)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert second.returncode == 2
    assert "in use by another sandbox service" in second.stderr


async def test_many_sandboxes_start_and_end_together(
    backend: BackendUnderTest, client: SandboxClient, repository: EnvironmentTree
) -> None:
    await client.put_environment(repository)

    async def one(number: int) -> str:
        async with await client.create(repository) as sandbox:
            return (await sandbox.run(f"echo {number}")).stdout

    outputs = await asyncio.gather(*(one(number) for number in range(backend.many)))
    assert outputs == [f"{number}\n" for number in range(backend.many)]
