"""One in ten sandbox creates, commands and gradings fails, as a broken machine would fail them.

A run goes through it: every faulted try has to end as FAULT with its stage and cause, be made
again, and never be trained or counted as a wrong answer. One attempt of the run never ends at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from integration_tests.harness import Stack, StageRun, Witness, grpo_recipe, needs_root, running
from integration_tests.records import LedgerView, trained_groups

pytestmark = needs_root

STEPS = 4
GROUP_SIZE = 4
RATE = 0.1
STUCK = 2
"""The group, counted from 1, whose first attempt never gets an answer from the engine."""
FAULTS = {
    ("SANDBOX_START", "INJECTED"),
    ("COMMAND", "INJECTED"),
    ("GRADE", "INJECTED"),
}


@dataclass(frozen=True)
class Try:
    """One try at one attempt, as the ledger has it."""

    group_id: str
    epoch: int
    index: int
    number: int
    outcome: str
    final: bool
    stage: str | None
    cause: str | None


@dataclass
class FaultyRun:
    """What a run under faults has left."""

    run: StageRun = field(default_factory=StageRun)
    tries: dict[tuple[str, int, int, int], Try] = field(default_factory=dict)
    complete: set[tuple[str, int]] = field(default_factory=set)
    ledger: LedgerView | None = None
    losses: list[str] = field(default_factory=list)
    trained: set[str] = field(default_factory=set)
    sandboxes: list[str] = field(default_factory=list)


def look(ledger: Path, faulty: FaultyRun) -> None:
    """Remember every ended try, and which groups had all of theirs ended."""
    sql = sqlite3.connect(f"{(ledger / 'ledger.sqlite').as_uri()}?mode=ro", uri=True, timeout=10)
    with contextlib.closing(sql):
        sql.execute("BEGIN")
        for row in sql.execute(
            "SELECT group_id, epoch, attempt, try, outcome, final,"
            " tries.fault_stage, tries.fault_cause"
            " FROM tries JOIN groups USING (group_row) WHERE outcome IS NOT NULL"
        ):
            faulty.tries[row[:4]] = Try(*row)
        # Their tries are all there until the group is committed.
        faulty.complete |= {
            (group_id, epoch)
            for group_id, epoch in sql.execute(
                "SELECT group_id, epoch FROM groups WHERE state IN ('FINISHED', 'RECEIVED')"
            )
        }


async def run_under_faults(folder: Path) -> FaultyRun:
    faulty = FaultyRun()
    stack = Stack(
        folder,
        engine_delay_s=0.1,
        settings=[
            f'engine.stuck=["{STUCK}-0"]',
            f"sandbox.faults.create_rate={RATE}",
            f"sandbox.faults.exec_rate={RATE}",
            f"eval.grading.faults.grade_rate={RATE}",
            # A try fails with a probability of about 0.4: give each index many.
            "rollout.refills.per_attempt=30",
            "rollout.refills.per_group=200",
            "rollout.refills.backoff_initial_s=0.05",
            "rollout.refills.backoff_max_s=0.2",
        ],
    )
    witness = Witness(lambda: stack.ledger)

    async def watch() -> None:
        while True:
            if witness.look() is not None:
                look(stack.ledger, faulty)
            await asyncio.sleep(0.1)

    # Commits follow checkpoints: with one at the end alone, the ledger holds every try till then.
    recipe = grpo_recipe(STEPS, checkpoint={"every_steps": STEPS + 1})
    async with running(stack) as services, asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        async with asyncio.timeout(240):
            await faulty.run.follow(services, recipe)
        watching.cancel()
        faulty.ledger = witness.look()
        faulty.losses = witness.losses
        faulty.trained = {trained.group_id for trained in trained_groups(stack.stage_folder)}
        faulty.sandboxes = await stack.sandboxes()
    return faulty


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> FaultyRun:
    return asyncio.run(run_under_faults(tmp_path_factory.mktemp("faults")))


def faulted(run: FaultyRun) -> list[Try]:
    return [one for one in run.tries.values() if one.outcome == "FAULT"]


def test_a_run_ends_under_faults(faulty: FaultyRun) -> None:
    assert faulty.run.ended is not None
    assert (faulty.run.ended.state, faulty.run.ended.steps) == ("finished", STEPS)
    assert faulty.losses == []
    assert faulty.sandboxes == []


def test_each_kind_of_fault_is_recorded_with_its_stage_and_cause(faulty: FaultyRun) -> None:
    found = Counter((one.stage, one.cause) for one in faulted(faulty))
    assert set(found) == FAULTS, found
    assert all(
        one.stage is None and one.cause is None
        for one in faulty.tries.values()
        if one.outcome != "FAULT"
    )
    counted = faulty.run.counts()
    told = {tuple(name.split(".")[1:]) for name in counted if name.startswith("fault.")}
    assert told == FAULTS


def test_every_fault_is_refilled_until_the_attempt_is_valid(faulty: FaultyRun) -> None:
    assert faulty.complete
    for group_id, epoch in faulty.complete:
        tries = [t for t in faulty.tries.values() if (t.group_id, t.epoch) == (group_id, epoch)]
        final = {one.index: one for one in tries if one.final}
        assert sorted(final) == list(range(GROUP_SIZE))
        for one in tries:
            # Faults come first, and the one valid try is the last of its index.
            assert (one.outcome == "FAULT") == (one.number < final[one.index].number)
        assert {one.outcome for one in final.values()} <= {"SOLVED", "UNSOLVED", "LIMIT_REACHED"}
    assert faulty.ledger is not None
    assert not any(group.fault_cause for group in faulty.ledger.groups.values())
    counted = faulty.run.counts()
    assert counted["tasks_quarantined"] == 0
    assert counted["outcome.FAULT"] == 0, "no index was delivered as a fault"


def test_no_faulted_try_is_trained(faulty: FaultyRun) -> None:
    counted = faulty.run.counts()
    assert counted["faulted_tries"] > 0
    assert counted["faults_trained"] == 0
    assert all(step.counts["faults_trained"] == 0 for step in faulty.run.steps)
    # What was trained are the valid attempts of the trained groups: no more, and no fewer.
    assert len(faulty.trained) == STEPS * 3
    assert counted["attempts_trained"] == len(faulty.trained) * GROUP_SIZE
    with_faults = {one.group_id for one in faulted(faulty)}
    assert faulty.trained & with_faults, "groups with refilled attempts are trained too"


def test_groups_count_rewards_of_valid_attempts_alone(faulty: FaultyRun) -> None:
    """The mean reward that the trainer tells is that of the valid tries in the ledger."""
    counted = faulty.run.counts()
    solved, unsolved = counted["outcome.SOLVED"], counted["outcome.UNSOLVED"]
    assert solved + unsolved + counted["outcome.LIMIT_REACHED"] == (
        counted["groups_arrived"] * GROUP_SIZE
    )
    for step in faulty.run.steps:
        arrived = step.counts.get("groups_arrived", 0)
        if arrived:
            wins = step.values["reward.mean"] * arrived * GROUP_SIZE
            assert wins == pytest.approx(step.counts.get("outcome.SOLVED", 0))


def test_an_attempt_that_never_ends_holds_no_step_up(faulty: FaultyRun) -> None:
    assert faulty.ledger is not None
    names = sorted(group_id for group_id, _ in faulty.ledger.groups)
    stuck = names[STUCK - 1]
    assert faulty.ledger.groups[stuck, 1].decision == "WITHDRAWN"
    assert (stuck, 1) not in faulty.complete
    later = [group for group in faulty.trained if group > stuck]
    assert len(later) >= (STEPS - 1) * 3, "all that started after it went past it"
