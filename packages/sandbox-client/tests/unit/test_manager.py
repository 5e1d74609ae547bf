"""The manager over a back-end that exists only in memory, under a clock of the test's own."""

import asyncio
from collections.abc import Sequence
from typing import IO

import pytest
from sandbox_client.backends.base import ExecHooks
from sandbox_client.checks import complete_spec
from sandbox_client.config import SandboxServiceConfig
from sandbox_client.core.limits import LimiterStatus
from sandbox_client.errors import (
    EnvironmentUnknown,
    IdempotencyConflict,
    InjectedFault,
    QuotaExhausted,
    SandboxGone,
    SandboxUnavailable,
    WrongRequest,
)
from sandbox_client.limiter import Quota
from sandbox_client.manager import Created, SandboxManager
from sandbox_client.types import Command, EnvironmentRef, ExecResult, FileContent, SandboxSpec

SPEC = SandboxSpec(EnvironmentRef(tree_digest="d"))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class MemorySandbox:
    def __init__(self) -> None:
        self.lost = ""
        self.destroyed = 0
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self.commands: list[Command] = []
        self.snapshots: list[str] = []

    async def run(self, command: Command, hooks: ExecHooks) -> ExecResult:
        self.commands.append(command)
        await self.may_finish.wait()
        return ExecResult(0, wall_s=1.0)

    async def snapshot(self, snapshot_id: str) -> int:
        self.snapshots.append(snapshot_id)
        await self.may_finish.wait()
        return 7

    async def destroy(self) -> None:
        self.destroyed += 1
        await self.may_end.wait()

    async def write_files(self, files: Sequence[FileContent]) -> None:
        raise NotImplementedError

    async def read_file(self, path: str, max_bytes: int) -> IO[bytes]:
        raise NotImplementedError

    async def upload_tree(self, archive: IO[bytes], path: str) -> None:
        raise NotImplementedError

    async def download_tree(self, path: str, out: IO[bytes]) -> None:
        raise NotImplementedError

    async def diff(self, max_bytes: int) -> bytes:
        raise NotImplementedError

    async def apply_patch(self, patch: bytes) -> list[str]:
        raise NotImplementedError


class MemoryBackend:
    name = "memory"
    idle_bytes = 10

    def __init__(self) -> None:
        self.made: list[MemorySandbox] = []
        self.specs: list[SandboxSpec] = []
        self.fail: Exception | None = None
        self.removed: list[str] = []
        self.may_create = asyncio.Event()
        self.may_create.set()

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> MemorySandbox:
        self.specs.append(spec)
        await self.may_create.wait()
        if self.fail is not None:
            raise self.fail
        self.made.append(MemorySandbox())
        return self.made[-1]

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    def missing_protections(self) -> tuple[str, ...]:
        return ("walls",)

    def missing_environments(self, digests: Sequence[str]) -> list[str]:
        return list(digests)

    async def put_environment(self, digest: str, archive: IO[bytes]) -> bool:
        return True

    async def remove_snapshot(self, snapshot_id: str) -> None:
        self.removed.append(snapshot_id)

    def limiters(self) -> list[LimiterStatus]:
        return [LimiterStatus("space", 10.0, 4.0)]


class House:
    def __init__(self, **settings: object) -> None:
        self.clock = Clock()
        self.backend = MemoryBackend()
        self.config = SandboxServiceConfig.model_validate(settings)
        self.manager = SandboxManager(self.config, self.backend, clock=self.clock)

    async def create(self, key: str = "k", **options: object) -> Created:
        given = {"owner": "o", "spec": SPEC, **options}
        return await self.manager.create(key=key, **given)  # type: ignore[arg-type]


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_failed_create_gives_its_key_and_place_back() -> None:
    house = House(limits={"sandboxes": 1})
    house.backend.fail = SandboxUnavailable("no")
    with pytest.raises(SandboxUnavailable):
        await house.create()
    house.backend.fail = None
    assert not (await house.create()).existed


async def test_whoever_waits_for_the_same_create_shares_its_outcome() -> None:
    house = House()
    house.backend.may_create.clear()
    first, second = (asyncio.create_task(house.create()) for _ in range(2))
    await turn()
    house.backend.may_create.set()
    made, found = await first, await second
    assert made.sandbox_id == found.sandbox_id
    assert (made.existed, found.existed) == (False, True)
    assert len(house.backend.made) == 1


async def test_whoever_waits_for_a_failing_create_gets_its_error() -> None:
    house = House()
    house.backend.may_create.clear()
    house.backend.fail = EnvironmentUnknown("put it")
    tasks = [asyncio.create_task(house.create()) for _ in range(2)]
    await turn()
    house.backend.may_create.set()
    for task in tasks:
        with pytest.raises(EnvironmentUnknown):
            await task


async def test_whoever_waits_for_a_cancelled_create_may_try_again() -> None:
    house = House()
    house.backend.may_create.clear()
    first, second = (asyncio.create_task(house.create()) for _ in range(2))
    await turn()
    first.cancel()
    with pytest.raises(SandboxUnavailable):
        await second
    house.backend.may_create.set()
    assert not (await house.create()).existed


async def test_a_key_means_one_request() -> None:
    house = House()
    await house.create(labels={"a": "1"})
    with pytest.raises(IdempotencyConflict):
        await house.create(labels={"a": "2"})


async def test_defaults_reach_the_back_end() -> None:
    house = House(sandbox={"memory_bytes": 64 << 20, "pids": 77})
    await house.create()
    limits = house.backend.specs[0].limits
    assert (limits.memory_bytes, limits.pids, limits.cpus) == (64 << 20, 77, 2.0)
    assert limits.disk_bytes == 48 << 20  # files live in memory and must not fill it


async def test_the_number_of_sandboxes_is_limited_also_while_they_end() -> None:
    house = House(limits={"sandboxes": 1, "retry_after_s": 3.0})
    made = await house.create("a")
    with pytest.raises(QuotaExhausted) as caught:
        await house.create("b")
    assert (caught.value.retryable, caught.value.retry_after_s) == (True, 3.0)
    house.backend.made[0].may_end.clear()
    ending = asyncio.create_task(house.manager.destroy(made.sandbox_id))
    await turn()
    with pytest.raises(QuotaExhausted):
        await house.create("b")
    house.backend.made[0].may_end.set()
    assert await ending
    assert not (await house.create("b")).existed


async def test_starts_have_a_rate() -> None:
    house = House(limits={"starts_per_s": 0.5, "start_burst": 2})
    await house.create("a")
    await house.create("b")
    with pytest.raises(QuotaExhausted) as caught:
        await house.create("c")
    assert caught.value.retry_after_s == pytest.approx(2.0)
    house.clock.now += 2
    await house.create("c")


async def test_starts_wait_in_line() -> None:
    house = House(limits={"concurrent_starts": 1})
    house.backend.may_create.clear()
    tasks = [asyncio.create_task(house.create(f"k{n}")) for n in range(3)]
    await turn()
    assert len(house.backend.specs) == 1
    status = {s.name: s for s in house.manager.limiters()}["concurrent_starts"]
    assert (status.in_use, status.waiting) == (1, 2)
    house.backend.may_create.set()
    await asyncio.gather(*tasks)


async def test_the_reaper_ends_what_is_over_and_what_is_lost() -> None:
    house = House()
    over = await house.create("a", lease_s=10)
    lost = await house.create("b", lease_s=1000)
    kept = await house.create("c", lease_s=1000)
    house.backend.made[1].lost = "it fell"
    house.clock.now += 10
    assert house.manager.reap() == [over.sandbox_id, lost.sandbox_id]
    await turn()
    assert [sandbox.destroyed for sandbox in house.backend.made] == [1, 1, 0]
    assert [info.sandbox_id for info in house.manager.sandboxes()] == [kept.sandbox_id]
    assert house.manager.reap() == []
    with pytest.raises(SandboxGone):
        house.manager.get(over.sandbox_id)


async def test_renewing_keeps_alive_and_names_the_gone() -> None:
    house = House()
    kept = await house.create("a", lease_s=10)
    lost = await house.create("b", lease_s=10)
    house.backend.made[1].lost = "it fell"
    house.clock.now += 9
    gone = house.manager.renew([kept.sandbox_id, lost.sandbox_id, "nobody"], 10)
    assert gone == [lost.sandbox_id, "nobody"]
    house.clock.now += 9
    assert kept.sandbox_id not in house.manager.reap()


@pytest.mark.parametrize("lease_s", [-1, 1e9])
async def test_a_lease_out_of_bounds_is_refused(lease_s: float) -> None:
    house = House()
    with pytest.raises(WrongRequest, match="lease"):
        await house.create(lease_s=lease_s)
    with pytest.raises(WrongRequest, match="lease"):
        house.manager.renew([], lease_s)


@pytest.mark.parametrize(
    "options",
    [
        {"key": ""},
        {"key": "x" * 256},
        {"owner": "x" * 256},
        {"labels": dict.fromkeys(map(str, range(65)), "")},
    ],
)
async def test_names_out_of_bounds_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(WrongRequest):
        await House().create(**options)  # type: ignore[arg-type]


async def test_destroying_waits_for_a_create_that_is_under_way() -> None:
    house = House()
    house.backend.may_create.clear()
    creating = asyncio.create_task(house.create())
    await turn()
    (record,) = house.manager._leases.records()
    destroying = asyncio.create_task(house.manager.destroy(record.sandbox_id))
    await turn()
    assert not destroying.done()
    house.backend.may_create.set()
    await asyncio.wait({creating})
    assert await destroying
    assert house.backend.made[0].destroyed == 1


async def test_destroying_twice_ends_once() -> None:
    house = House()
    made = await house.create()
    house.backend.made[0].may_end.clear()
    both = [asyncio.create_task(house.manager.destroy(made.sandbox_id)) for _ in range(2)]
    await turn()
    house.backend.made[0].may_end.set()
    assert await asyncio.gather(*both) == [True, True]
    assert house.backend.made[0].destroyed == 1
    assert not await house.manager.destroy(made.sandbox_id)


async def test_commands_wait_in_line_and_their_wait_is_no_run_time() -> None:
    house = House(limits={"commands": 1})
    made = await house.create()
    sandbox = house.backend.made[0]
    sandbox.may_finish.clear()
    tasks = [
        asyncio.create_task(house.manager.run(made.sandbox_id, Command(shell="x")))
        for _ in range(2)
    ]
    await turn()
    assert len(sandbox.commands) == 1
    assert house.manager.sandboxes()[0].running_commands == 1
    house.clock.now += 50
    sandbox.may_finish.set()
    results = await asyncio.gather(*tasks)
    assert [result.wall_s for result in results] == [1.0, 1.0]
    status = {s.name: s for s in house.manager.limiters()}["commands"]
    assert status.wait_max_s == 50


async def test_a_command_gets_the_configured_time_and_bound() -> None:
    house = House(exec={"default_timeout_s": 7, "max_output_bytes": 99})
    made = await house.create()
    await house.manager.run(made.sandbox_id, Command(shell="x"))
    await house.manager.run(made.sandbox_id, Command(shell="x", timeout_s=1, max_output_bytes=5))
    seen = [(c.timeout_s, c.max_output_bytes) for c in house.backend.made[0].commands]
    assert seen == [(7, 99), (1, 5)]


async def test_injected_faults_fail_creates_and_commands() -> None:
    house = House(faults={"create_rate": 1.0})
    with pytest.raises(InjectedFault):
        await house.create()
    assert house.backend.specs == []
    house = House(faults={"exec_rate": 1.0})
    made = await house.create()
    with pytest.raises(InjectedFault):
        await house.manager.run(made.sandbox_id, Command(shell="x"))
    assert house.backend.made[0].commands == []


async def test_an_injected_delay_counts_as_run_time_of_the_command() -> None:
    house = House(delay={"median_s": 0.05, "sigma": 0})
    made = await house.create()
    result = await house.manager.run(made.sandbox_id, Command(shell="x"))
    assert result.wall_s == pytest.approx(1.05)


async def test_stopping_ends_every_sandbox() -> None:
    house = House()
    for key in "abc":
        await house.create(key)
    await house.manager.stop()
    assert [sandbox.destroyed for sandbox in house.backend.made] == [1, 1, 1]


async def test_the_status_names_every_limiter_and_missing_protection() -> None:
    house = House()
    await house.create()
    status = house.manager.status()
    assert (status.backend, status.sandboxes) == ("memory", 1)
    assert status.missing_protections == ("walls",)
    in_use = {limiter.name: limiter.in_use for limiter in status.limiters}
    assert in_use == {
        "sandboxes": 1.0,
        "starts_per_s": 0.0,
        "concurrent_starts": 0.0,
        "commands": 0.0,
        "spool_bytes": 0.0,
        "snapshots": 0.0,
        "pool_sandboxes": 0.0,
        "pool_memory_bytes": 0.0,
        "space": 4.0,
    }


async def test_an_idle_sandbox_is_taken_under_its_own_id_and_starts_nothing() -> None:
    house = House(pool={"sandboxes": 2}, limits={"starts_per_s": 0.001, "start_burst": 3})
    pool = house.manager._pool
    first = await house.create("a")
    while await pool.step():
        pass
    # The burst's other two tokens went into these.
    assert len(house.backend.made) == 3
    second = await house.create("b")
    assert len(house.backend.made) == 3
    assert house.manager.get(second.sandbox_id) is house.backend.made[1]
    assert (await house.create("b")).sandbox_id == second.sandbox_id
    # An idle one that was lost meanwhile is no answer.
    house.backend.made[2].lost = "it fell"
    with pytest.raises(QuotaExhausted):
        await house.create("c")
    assert {first.sandbox_id, second.sandbox_id} == {
        s.sandbox_id for s in house.manager.sandboxes()
    }
    await house.manager.stop()
    assert [sandbox.destroyed for sandbox in house.backend.made] == [1, 1, 1]


async def test_the_pool_gives_way_to_creates_and_serves_only_what_is_alike() -> None:
    house = House(pool={"sandboxes": 2}, limits={"sandboxes": 2})
    pool = house.manager._pool
    await house.create("a")
    house.backend.may_create.clear()
    other = SandboxSpec(EnvironmentRef(tree_digest="d", env={"A": "1"}))
    creating = asyncio.create_task(house.create("b", spec=other))
    await turn()
    assert not await pool.step()
    house.backend.may_create.set()
    await creating
    assert len(house.backend.made) == 2
    assert await pool.step()
    # A refusal leaves the idle one where it is.
    with pytest.raises(QuotaExhausted):
        await house.create("c", spec=other)
    assert pool.find(complete_spec(house.config.sandbox, other)) is not None


async def test_a_failing_back_end_is_not_asked_for_idle_sandboxes_again_and_again() -> None:
    house = House(pool={"sandboxes": 2})
    await house.create("a")
    house.backend.fail = SandboxUnavailable("no")
    assert await house.manager._pool.step()
    assert not await house.manager._pool.step()
    assert len(house.backend.specs) == 2


async def test_a_snapshot_is_held_by_what_started_from_it() -> None:
    house = House(lease={"reap_interval_s": 1})
    manager = house.manager
    spec = SandboxSpec(EnvironmentRef(tree_digest="d", workdir="/w", env={"A": "1", "B": "1"}))
    made = await house.create("a", spec=spec)
    snapshot = await manager.snapshot(made.sandbox_id, "k", 10)
    assert (snapshot.size_bytes, snapshot.workdir, snapshot.lease_s) == (7, "/w", 10)
    assert await manager.snapshot(made.sandbox_id, "k", 10) == snapshot
    reference = EnvironmentRef(snapshot=snapshot.snapshot_id, env={"B": "2"})
    fork = await house.create("b", spec=SandboxSpec(reference))
    assert fork.workdir == "/w"
    assert house.backend.specs[-1].environment.env == {"A": "1", "B": "2"}
    assert await manager.destroy_snapshot(snapshot.snapshot_id)
    assert house.backend.removed == []
    with pytest.raises(EnvironmentUnknown):
        await house.create("c", spec=SandboxSpec(reference))
    await manager.destroy(fork.sandbox_id)
    await manager._snapshots.reap()
    assert house.backend.removed == [snapshot.snapshot_id]


async def test_a_fork_that_cannot_be_made_holds_no_snapshot() -> None:
    house = House()
    made = await house.create("a")
    snapshot = await house.manager.snapshot(made.sandbox_id, "k", 10)
    house.backend.fail = SandboxUnavailable("no")
    spec = SandboxSpec(EnvironmentRef(snapshot=snapshot.snapshot_id))
    with pytest.raises(SandboxUnavailable):
        await house.create("b", spec=spec)
    await house.manager.destroy_snapshot(snapshot.snapshot_id)
    assert house.backend.removed == [snapshot.snapshot_id]


async def test_snapshots_are_bounded_and_a_sandbox_at_work_has_none() -> None:
    house = House(limits={"snapshots": 1})
    made = await house.create("a")
    await house.manager.snapshot(made.sandbox_id, "k", 10)
    with pytest.raises(QuotaExhausted, match="snapshots"):
        await house.manager.snapshot(made.sandbox_id, "l", 10)
    house.backend.made[0].may_finish.clear()
    running = asyncio.create_task(house.manager.run(made.sandbox_id, Command(shell="x")))
    await turn()
    with pytest.raises(WrongRequest, match="running"):
        await house.manager.snapshot(made.sandbox_id, "m", 10)
    house.backend.made[0].may_finish.set()
    await running


def test_a_quota_refuses_what_is_too_much_and_takes_back_what_was_shared() -> None:
    quota = Quota("spool_bytes", 10, 3.0)
    with quota.share() as take:
        take(6)
        with quota.share() as other:
            with pytest.raises(QuotaExhausted, match="spool_bytes") as caught:
                other(5)
            other(4)
            assert quota.status().in_use == 10
        assert quota.left == 4
    assert (quota.left, caught.value.retry_after_s) == (10, 3.0)
