"""Sandboxes of which some are very slow: steps go on past the attempts in them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from integration_tests.harness import Stack, StageRun, grpo_recipe, needs_root, running
from integration_tests.records import LedgerView, read_ledger

pytestmark = needs_root


async def run_with_slow_sandboxes(folder: Path) -> tuple[StageRun, LedgerView]:
    run = StageRun()
    stack = Stack(
        folder,
        settings=[
            # Log-normal with a wide spread: in one sandbox of twenty a command takes 7 s and more.
            "sandbox.delay.median_s=0.05",
            "sandbox.delay.sigma=3.0",
            "sandbox.delay.max_s=8.0",
        ],
    )
    async with running(stack) as services, asyncio.timeout(250):
        await run.follow(services, grpo_recipe(5))
        return run, read_ledger(stack.ledger)


@pytest.mark.slow
def test_steps_go_past_slow_sandboxes(tmp_path: Path) -> None:
    run, ledger = asyncio.run(run_with_slow_sandboxes(tmp_path))
    assert run.ended is not None
    assert run.ended.state == "finished"
    steps = {group.group_id: group.step or 0 for group in ledger.trained()}
    withdrawn = {g.group_id: 99 for g in ledger.groups.values() if g.decision == "WITHDRAWN"}
    order = sorted((steps | withdrawn).items())
    overtaken = [
        (early, late)
        for place, (early, early_step) in enumerate(order)
        for late, late_step in order[place + 1 :]
        if late_step < early_step
    ]
    assert overtaken, "groups were trained before others that had started earlier"
