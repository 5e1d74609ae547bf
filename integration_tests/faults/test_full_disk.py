"""The disk of the ledger and the checkpoints fills up in the midst of a run, and is freed again."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

from tailrace.trainer.v1 import trainer_service_pb2 as trainer_pb
from tailrace_cli.demo.services import Services

from integration_tests.harness import (
    Stack,
    StageRun,
    Witness,
    grpo_recipe,
    needs_root,
    running,
    small_disk,
    until,
)
from integration_tests.records import read_ledger

pytestmark = needs_root

STEPS = 5
MIB = 1 << 20


def fill(file: Path) -> None:
    """Write until nothing fits any more, not even a small file."""
    with file.open("wb", buffering=0) as ballast:
        for piece in (MIB, 4096, 1):
            with contextlib.suppress(OSError):
                while ballast.write(bytes(piece)):
                    pass


async def run_out_of_space(stack: Stack, services: Services, disk: Path) -> StageRun:
    """Fill the disk after two steps; empty it once the services have said what is wrong.

    Returns:
        What was heard of the run at its end.
    """
    recipe = grpo_recipe(STEPS, checkpoint={"every_steps": 1, "keep": 2})
    run = StageRun()
    following = asyncio.create_task(run.follow(services, recipe))
    await until(lambda: run.newest_step >= 2, "two steps", 120)
    fill(disk / "ballast")
    await until(lambda: "is full; free some space" in stack.log("rollout"), "a complaint", 60)
    failed = await has_failed(services, within_s=15)
    (disk / "ballast").unlink()
    if failed:  # it goes on from its checkpoint once there is space, as its error says
        following.cancel()
        await asyncio.wait([following])
        following = asyncio.create_task(run.follow(services, recipe))
    await asyncio.wait_for(following, 150)
    return run


async def has_failed(services: Services, *, within_s: float) -> bool:
    """Whether the trainer says within some time that the stage has failed."""
    for _ in range(int(within_s / 0.1)):
        status = await services.trainer.GetStatus(trainer_pb.GetStatusRequest(), timeout=10)
        if status.stages[-1].state == trainer_pb.STAGE_STATE_FAILED:
            return True
        await asyncio.sleep(0.1)
    return False


async def scenario(folder: Path, disk: Path) -> None:
    on_disk = [f"rollout.ledger.folder={disk}/ledger", f"trainer.run_dir={disk}/trainer"]
    stack = Stack(folder, engine_delay_s=0.2, settings=on_disk)
    witness = Witness(lambda: stack.ledger)
    async with running(stack) as services, asyncio.TaskGroup() as group:
        looking = group.create_task(witness.run())
        run = await run_out_of_space(stack, services, disk)
        looking.cancel()
        assert run.ended is not None
        assert (run.ended.state, run.ended.steps) == ("finished", STEPS)
        witness.look()
        assert witness.looks > 10
        assert witness.losses == []
        trained = read_ledger(stack.ledger).trained()
        assert Counter(g.step for g in trained) == dict.fromkeys(range(1, STEPS + 1), 3)
        assert len({g.group_id for g in trained}) == len(trained)


def test_a_run_survives_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 128 * MIB):
        asyncio.run(scenario(tmp_path, tmp_path / "disk"))
