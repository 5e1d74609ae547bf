"""SIGKILL in the midst of a run: of each process in turn, and then of everything at once.

One run meets all deaths, and the tests look at what is left of it: the ledger as it was seen ten
times a second, the trainer's checkpoints and events, the versions, the processes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tailrace_cli.demo.services import connect

from integration_tests.harness import (
    STAGE,
    Stack,
    StageRun,
    Witness,
    announced_versions,
    grpo_recipe,
    needs_root,
    running,
    until,
)
from integration_tests.processes import alive, descendants
from integration_tests.records import (
    LedgerView,
    TrainedGroup,
    read_ledger,
    stage_events,
    trained_groups,
)

pytestmark = needs_root

VICTIMS = ["sandbox", "eval", "weights", "engine", "rollout", "trainer", "everything"]
BATCH_GROUPS = 3
MANY = 1000
"""Steps of a stage that is stopped once everything has died."""
RUN_S = 240.0


@dataclass
class Chaos:
    """What a run with deaths has left."""

    steps: int = 0
    kills: list[str] = field(default_factory=list)
    run: StageRun = field(default_factory=StageRun)
    losses: list[str] = field(default_factory=list)
    looks: int = 0
    finished_before_a_kill: set[tuple[str, int]] = field(default_factory=set)
    ledger: LedgerView | None = None
    trained: set[TrainedGroup] = field(default_factory=set)
    events: list[dict[str, Any]] = field(default_factory=list)
    versions: list[Any] = field(default_factory=list)
    sandboxes: list[str] = field(default_factory=list)
    orphans: dict[str, set[tuple[int, str]]] = field(default_factory=dict)


class Assassin:
    """Runs a stage on a stack and kills processes in its midst.

    Args:
        folder: For the stack.
        victims: Processes in the order of their deaths; "everything" is the supervisor and all.
    """

    def __init__(self, folder: Path, victims: list[str]) -> None:
        # Attempts take a second or two, so that there are always some in the midst of something.
        self._stack = Stack(folder, engine_delay_s=0.5)
        self._victims = victims
        self._witness = Witness(lambda: self._stack.ledger)
        self.chaos = Chaos()

    async def run(self) -> Chaos:
        """The whole run."""
        chaos, stack = self.chaos, self._stack
        # Every second step: a death between two checkpoints throws a step away.
        recipe = grpo_recipe(MANY, checkpoint={"every_steps": 2, "keep": 1000})
        async with running(stack), asyncio.TaskGroup() as group:
            looking = group.create_task(self._witness.run())
            async with asyncio.timeout(RUN_S), connect(stack.targets) as services:
                following = group.create_task(chaos.run.follow(services, recipe))
                for victim in self._victims:
                    await self._kill_in_the_midst(victim)
                await self._next_step("the end")
                await services.stop_stage(STAGE)
                await following
                # How many steps there were hangs on how long the restarts took: now say how many.
                chaos.steps = chaos.run.newest_step + 1
                await chaos.run.follow(services, recipe | {"steps": chaos.steps})
                chaos.versions = await announced_versions(services)
            looking.cancel()
            await self._record()
        return chaos

    async def _kill_in_the_midst(self, victim: str) -> None:
        """Wait for a step since the last death, for attempts under way, and for finished ones."""
        chaos, stack = self.chaos, self._stack
        await self._next_step(f"the death of {victim}")
        await until(self._is_busy, f"attempts under way before {victim} dies")
        chaos.finished_before_a_kill |= self._finished()
        below = descendants(stack.supervisor_pid)
        if victim == "everything":
            stack.kill_everything()
            chaos.orphans[victim] = below
            await stack.start()
        else:
            pid = stack.pids()[victim]
            chaos.orphans[victim] = descendants(pid)
            await stack.kill(victim)
        chaos.kills.append(victim)

    async def _next_step(self, before: str) -> None:
        seen = len(self.chaos.run.steps)
        await until(lambda: len(self.chaos.run.steps) > seen, f"a step before {before}", 90)

    def _is_busy(self) -> bool:
        view = self._witness.look()
        return view is not None and view.running > 0 and bool(self._finished())

    def _finished(self) -> set[tuple[str, int]]:
        """Groups that have finished attempts and are not decided."""
        view = read_ledger(self._stack.ledger)
        return {
            key[:2]
            for key in view.attempts
            if view.groups[key[:2]].state not in ("COMMITTED", "WITHDRAWN")
        }

    async def _record(self) -> None:
        chaos, stack = self.chaos, self._stack
        chaos.ledger = self._witness.look()
        chaos.losses, chaos.looks = self._witness.losses, self._witness.looks
        chaos.trained = trained_groups(stack.stage_folder)
        chaos.events = stage_events(stack.stage_folder)
        # A grader that was killed leaves sandboxes behind, which end with their leases.
        for _ in range(750):
            chaos.sandboxes = await stack.sandboxes()
            chaos.orphans = {name: alive(below) for name, below in chaos.orphans.items()}
            if not chaos.sandboxes and not any(chaos.orphans.values()):
                return
            await asyncio.sleep(0.1)


def check(chaos: Chaos) -> None:
    """Everything that has to hold after any deaths."""
    assert_the_run_ended(chaos)
    assert_no_finished_attempt_was_lost(chaos)
    assert_no_group_was_trained_twice(chaos)
    assert_versions_rise(chaos)
    assert_nothing_is_left_behind(chaos)


def assert_the_run_ended(chaos: Chaos) -> None:
    assert chaos.run.ended is not None
    assert (chaos.run.ended.state, chaos.run.ended.steps) == ("finished", chaos.steps)
    assert chaos.events[-1]["kind"] == "ended"


def assert_no_finished_attempt_was_lost(chaos: Chaos) -> None:
    assert chaos.looks > 20
    assert chaos.losses == []
    assert chaos.ledger is not None
    assert chaos.finished_before_a_kill
    epochs = dict(sorted(chaos.ledger.groups))  # the last epoch of each group
    undecided = {
        key: group
        for key, group in chaos.ledger.groups.items()
        if (group.state != "COMMITTED" or group.decision is None)
        # What a later epoch has taken the place of is decided with that one.
        and not (group.state == "WITHDRAWN" and group.epoch < epochs[group.group_id])
    }
    assert undecided == {}, "the stage is over: every group has to be decided"
    for group_id, _ in chaos.finished_before_a_kill:
        # Under this epoch or, if its tokens were of a branch that a death threw away, the next.
        decision = chaos.ledger.groups[group_id, epochs[group_id]].decision
        assert decision in {"TRAINED", "NO_VARIANCE", "STALE", "WITHDRAWN"}


def assert_no_group_was_trained_twice(chaos: Chaos) -> None:
    """In the lineage of checkpoints, and in what the engine was told."""
    assert chaos.ledger is not None
    told = chaos.ledger.trained()
    by_step = Counter(group.step for group in told)
    assert by_step == dict.fromkeys(range(1, chaos.steps + 1), BATCH_GROUPS)
    times = Counter(group.group_id for group in told)
    assert max(times.values()) == 1, times.most_common(3)
    decided = Counter(group.group_id for group in chaos.trained)
    assert max(decided.values()) == 1, decided.most_common(3)
    known = {TrainedGroup(g.group_id, g.epoch, g.step or 0) for g in told}
    assert chaos.trained == known


def assert_versions_rise(chaos: Chaos) -> None:
    published = [event for event in chaos.events if event["kind"] == "version"]
    numbers = [event["number"] for event in published]
    assert numbers == sorted(set(numbers)), "numbers rise, and none repeats"
    incarnations = [event["incarnation"] for event in published]
    assert incarnations == sorted(incarnations)
    lives = 1 + sum(victim in ("trainer", "everything") for victim in chaos.kills)
    assert len(set(incarnations)) == lives, "each life of the trainer is an incarnation"
    announced = [version.number for version in chaos.versions]
    # A trainer that is killed between the two has announced what it has not written down.
    assert set(numbers) <= set(announced)
    assert announced == sorted(set(announced))


def assert_nothing_is_left_behind(chaos: Chaos) -> None:
    assert chaos.sandboxes == []
    assert chaos.orphans == {name: set() for name in chaos.kills}


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Chaos:
    folder = tmp_path_factory.mktemp("chaos")
    return asyncio.run(Assassin(folder, VICTIMS).run())


def test_a_run_ends_whatever_was_killed(chaos: Chaos) -> None:
    assert chaos.kills == VICTIMS
    assert_the_run_ended(chaos)


def test_no_finished_attempt_is_lost(chaos: Chaos) -> None:
    assert_no_finished_attempt_was_lost(chaos)


def test_no_group_is_trained_twice_in_one_lineage(chaos: Chaos) -> None:
    assert_no_group_was_trained_twice(chaos)


def test_version_numbers_rise(chaos: Chaos) -> None:
    assert_versions_rise(chaos)


def test_no_sandbox_and_no_process_is_left_behind(chaos: Chaos) -> None:
    assert_nothing_is_left_behind(chaos)


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_run_survives_one_process_dying_again_and_again(victim: str, tmp_path: Path) -> None:
    check(asyncio.run(Assassin(tmp_path, [victim] * 3).run()))
