"""Random schedules with real processes: everything is killed, stopped, damaged, in any order."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from random import Random

import pytest
from weight_sync import PublishConfig

from integration_tests.weight_chaos.processes import Processes, world
from integration_tests.weight_chaos.roles import NEVER, Kill

EVENTS = 8
HEALS_WITHIN = 6
"""Versions after the last fault until every engine holds the newest."""


@pytest.mark.parametrize(
    "schedules", [3, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
async def test_no_schedule_of_kills_makes_an_engine_lie(tmp_path: Path, schedules: int) -> None:
    looks = 0
    for seed in range(schedules):
        async with world(tmp_path / str(seed), hosts=2) as processes:
            await Schedule(processes, seed).run()
            looks += processes.checker.looks
    assert looks > 8 * schedules


class Schedule:
    """One world's random life."""

    def __init__(self, processes: Processes, seed: int) -> None:
        self.processes = processes
        self.rng = Random(seed)
        self.config = PublishConfig(
            codec=self.rng.choice(["dense", "ulp-gap", "xor", "overwrite"]),
            anchor_every=self.rng.choice([3, 50]),
        )
        self.publishers = 0
        self.ahead_s = 0.0

    async def run(self) -> None:
        self.publish(NEVER)
        happenings = (
            self.kill_service,
            self.kill_receiver,
            self.kill_engine,
            self.kill_publisher,
            self.stop_something,
            self.damage,
            self.jump,
        )
        for _ in range(EVENTS):
            await asyncio.sleep(self.rng.random() * 0.15)
            await self.rng.choice(happenings)()
            await self.processes.check()
        await self.heal()

    def publish(self, kill_at: int) -> None:
        """Start another publisher; whoever was there is fenced off."""
        self.publishers += 1
        count = self.rng.randint(2, 12)
        self.processes.start_publisher(
            range(1, 1 + count),
            self.config,
            lineage=self.publishers,
            kill=Kill(kill_at),
            pause_s=0.03,
            name=f"publisher-{self.publishers}",
        )

    async def kill_service(self) -> None:
        self.processes.kill("service")
        self.processes.start_service()

    async def kill_receiver(self) -> None:
        name = self.rng.choice(self.processes.names)
        self.processes.kill(name)
        kill = Kill(self.rng.randint(0, 25))
        await self.processes.ended(self.processes.start_receiver(name, kill), within_s=0.4)
        self.processes.kill(name)
        self.processes.start_receiver(name)

    async def kill_engine(self) -> None:
        (port,) = self.processes.engines[self.rng.choice(self.processes.names)]
        self.processes.kill(f"engine-{port}")
        life = self.processes.start_engine(port, self.rng.randint(0, 8))
        await self.processes.ended(life, within_s=0.4)
        self.processes.kill(f"engine-{port}")
        self.processes.start_engine(port)

    async def kill_publisher(self) -> None:
        if self.rng.random() < 0.5:
            self.processes.kill(f"publisher-{self.publishers}")
        self.publish(self.rng.randint(0, 30))

    async def stop_something(self) -> None:
        name = self.rng.choice(sorted(self.processes.running))
        if self.processes.running[name].exitcode is None:
            self.processes.signal(name, signal.SIGSTOP)
            await asyncio.sleep(self.rng.random() * 0.3)
            self.processes.signal(name, signal.SIGCONT)

    async def damage(self) -> None:
        """Flip, cut off or delete a file of a version, a manifest perhaps."""
        files = sorted(self.processes.store.glob("run/*/*"))
        if not files:
            return
        path = self.rng.choice(files)
        try:
            data = bytearray(path.read_bytes())
            path.unlink()
        except FileNotFoundError:
            return  # pruned meanwhile
        kind = self.rng.choice(["flip", "cut", "delete"])
        if kind == "flip" and data:
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        if kind != "delete":
            path.write_bytes(data[: len(data) // 2] if kind == "cut" else data)

    async def jump(self) -> None:
        self.ahead_s += self.rng.choice([1.0, 60.0, 3600.0])
        self.processes.set_clock(self.ahead_s)

    async def heal(self) -> None:
        """Let the faults end, publishers among them: a few versions bring everybody along."""
        processes = self.processes
        for name in [name for name in processes.running if name.startswith("publisher")]:
            processes.kill(name)
        publisher = await processes.publisher(self.config)
        for step in range(HEALS_WITHIN):
            number = await processes.publish(publisher, step, lineage=1000)
            await processes.waited(number, engines=2, within_s=3.0)
            await processes.check()
        await processes.reached(number)
