"""Two publishers, sleepers, clocks that jump, and hosts that come late."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from weight_sync import PublishConfig

from integration_tests.weight_chaos.processes import world
from integration_tests.weight_chaos.roles import Kill

DELTAS = PublishConfig(codec="ulp-gap", anchor_every=5)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
async def test_a_publisher_that_slept_while_another_took_over_changes_nothing(
    tmp_path: Path, every: int
) -> None:
    """It is stopped before a step, and goes on after another has published in its place."""
    at = fenced = 0
    async with world(tmp_path) as processes:
        while True:
            asleep = Kill(at, signal.SIGSTOP)
            old = processes.start_publisher((1, 2), DELTAS, lineage=2 * at, kill=asleep, name="old")
            slept = await processes.asleep(old)
            new = processes.start_publisher((2, 3), DELTAS, lineage=2 * at + 1)
            assert await processes.ended(new) == 0
            await processes.reached(await processes.newest())
            if not slept:
                break
            processes.signal("old", signal.SIGCONT)
            # It learns that it was fenced, or had announced already and prunes what is its own.
            fenced += await processes.ended(old) != 0
            await processes.reached(await processes.newest())
            at += every
        assert fenced > at // every // 2 > 0
        # What it pruned was not the newcomer's: who joins now gets there.
        processes.kill(processes.names[0])
        processes.start_receiver(processes.names[0])
        ((port,),) = processes.engines.values()
        processes.kill(f"engine-{port}")
        processes.start_engine(port)
        publisher = await processes.publisher(DELTAS)
        await processes.reached(await processes.publish(publisher, 9))


async def test_publishers_that_fight_for_a_run_leave_it_whole(tmp_path: Path) -> None:
    async with world(tmp_path) as processes:
        lives = []
        for lineage in range(6):
            steps = range(1, 9)
            lives.append(
                processes.start_publisher(
                    list(steps), DELTAS, lineage=lineage, pause_s=0.02, name=f"p{lineage}"
                )
            )
            await asyncio.sleep(0.05)
        codes = [await processes.ended(life) for life in lives]
        assert codes.count(0) >= 1
        await processes.reached(await processes.newest())


async def test_clocks_that_jump_by_hours_cost_nothing_but_time(tmp_path: Path) -> None:
    async with world(tmp_path, hosts=2) as processes:
        publisher = await processes.publisher(DELTAS)
        for step in range(8):
            number = await processes.publish(publisher, step)
            processes.set_clock((step + 1) * 3600.0)  # as after a machine was suspended
            await processes.reached(number, engines=2)


@pytest.mark.parametrize("peers", [False, True])
async def test_a_host_that_comes_late_gets_there_from_an_anchor_or_a_peer(
    tmp_path: Path, peers: bool
) -> None:
    options: dict[str, Any] = {"peers": peers}
    async with world(tmp_path, hosts=2, engines=2) as processes:
        early, late = processes.names
        for name in processes.names:
            processes.kill(name)
        processes.start_receiver(early, **options)
        publisher = await processes.publisher(DELTAS)
        for step in range(8):
            await processes.reached(await processes.publish(publisher, step), engines=2)
        processes.start_receiver(late, **options)
        await processes.reached(await processes.newest(), engines=4)
        await processes.reached(await processes.publish(publisher, 8), engines=4)
