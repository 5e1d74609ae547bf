"""The GRPO stage over simulated engines: learning, staleness, faults, resume, accounting."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpo_trainer.checkpoint import CheckpointStore
from grpo_trainer.config import GrpoConfig
from grpo_trainer.errors import Stalled
from grpo_trainer.events import EventKind
from grpo_trainer.stage import StageState
from grpo_trainer.testing.game import TASKS
from grpo_trainer.testing.lives import Life, World, game_recipe
from grpo_trainer.testing.models import DENSE, write_model
from grpo_trainer.testing.simulated import SimulatedLedger
from rollout_engine.types import (
    Attempt,
    Decision,
    Fault,
    FaultCause,
    FaultedTry,
    FaultStage,
    FinishedGroup,
    GroupKey,
    Outcome,
)
from service_kit.errors import Reason


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "run", write_model(tmp_path / "model", DENSE, scale=0.02))


def notes(life: Life) -> str:
    events = life.context.events.events
    return "\n".join(e.data["text"] for e in events if e.kind is EventKind.NOTE)


def decisions(world: World) -> Counter[str]:
    return Counter(
        decision.value
        for ledger in world.ledgers.values()
        for decision, _ in ledger.committed.values()
    )


def trained_groups(world: World) -> list[tuple[str, int]]:
    return sorted(
        (key.group_id, step)
        for ledger in world.ledgers.values()
        for key, (decision, step) in ledger.committed.items()
        if decision is Decision.TRAINED
    )


def arrived_rewards(life: Life) -> list[float]:
    """Mean rewards of the steps before which anything arrived."""
    values = [step.data["values"] for step in life.steps()]
    return [found["reward.mean"] for found in values if "reward.mean" in found]


def totals(life: Life, name: str) -> int:
    return sum(step.data["counts"].get(name, 0) for step in life.steps())


async def test_the_policy_learns_the_game(world: World) -> None:
    optimizer = {"learning_rate": 0.03, "warmup_steps": 0}
    recipe = game_recipe(steps=12, batch_groups=4, group_size=8, optimizer=optimizer)
    life = world.life(recipe)
    assert await life.run() is StageState.FINISHED
    rewards = arrived_rewards(life)
    assert np.mean(rewards[:3]) < 0.5
    assert np.mean(rewards[-3:]) > 0.8


async def test_shuffled_rewards_teach_nothing(world: World) -> None:
    optimizer = {"learning_rate": 0.03, "warmup_steps": 0}
    recipe = game_recipe(steps=12, batch_groups=4, group_size=8, optimizer=optimizer)
    life = world.life(recipe.model_copy(update={"shuffle_rewards": True}))
    await life.run()
    rewards = arrived_rewards(life)
    assert np.mean(rewards[-3:]) < 0.6


async def test_groups_are_sampled_ahead_and_never_beyond_the_bound(world: World) -> None:
    life = world.life(game_recipe(admission={"staleness_bound": 2, "pace_headroom": 0}))
    await life.run()
    found = Counter[str]()
    for step in life.steps():
        found.update({n: c for n, c in step.data["counts"].items() if n.startswith("staleness.")})
    assert set(found) <= {"staleness.0", "staleness.1", "staleness.2"}
    assert found["staleness.2"] > 0
    assert max(step.data["values"]["staleness.max"] for step in life.steps()) == 2


async def test_sync_mode_trains_fresh_groups_once_every_engine_has_the_weights(
    world: World,
) -> None:
    recipe = game_recipe(mode="sync", admission={"staleness_bound": 0, "pace_headroom": 0})
    life = world.life(recipe)
    await life.run()
    assert {step.data["values"]["staleness.max"] for step in life.steps()} == {0.0}
    assert world.weight_sync.awaited == [version.number for version in world.weight_sync.versions]


async def test_without_back_fill_a_step_takes_what_has_variance_of_its_batch(world: World) -> None:
    recipe = game_recipe(
        mode="sync",
        backfill=False,
        batch_groups=4,
        group_size=2,
        admission={"staleness_bound": 0, "pace_headroom": 0},
    )
    life = world.life(recipe)
    await life.run()
    sizes = [step.data["counts"]["groups_trained"] for step in life.steps()]
    skipped = totals(life, "decision.NO_VARIANCE")
    assert max(sizes) <= 4
    assert skipped > 0
    assert (sum(sizes) + skipped) % 4 == 0


async def test_weights_are_published_straight_after_each_step(world: World) -> None:
    life = world.life(game_recipe())
    await life.run()
    versions = world.weight_sync.versions
    assert [version.step for version in versions] == list(range(7))
    assert [version.parent for version in versions] == [0, 1, 2, 3, 4, 5, 6]
    kinds = [event.kind for event in life.context.events.events]
    assert kinds[0] is EventKind.VERSION
    for index, kind in enumerate(kinds):
        if kind is EventKind.STEP:
            assert EventKind.VERSION in kinds[index - 2 : index]


async def test_a_stage_stopped_and_resumed_equals_an_uninterrupted_one_bit_for_bit(
    tmp_path: Path,
) -> None:
    model = write_model(tmp_path / "model", DENSE, scale=0.02)
    recipe = game_recipe(steps=7)
    whole = World(tmp_path / "whole", model)
    through = whole.life(recipe)
    assert await through.run() is StageState.FINISHED

    parts = World(tmp_path / "parts", model)
    for stop_after in (1, 3, 5):
        life = parts.life(recipe)
        assert await life.run(stop_after=stop_after) is StageState.STOPPED
        assert stop_after <= life.stage.step < 7
    last = parts.life(recipe)
    assert await last.run() is StageState.FINISHED

    assert last.weights() == through.weights()
    assert trained_groups(parts) == trained_groups(whole)
    figures = ("loss", "grad_norm", "reward.mean_trained", "staleness.mean")
    for ours, theirs in zip(last.steps(), through.steps(), strict=True):
        for name in figures:
            assert ours.data["values"][name] == theirs.data["values"][name]


@pytest.mark.parametrize("bound", [0, 2])
async def test_whenever_it_is_killed_nothing_is_trained_twice_and_nothing_is_lost(
    tmp_path: Path, bound: int
) -> None:
    model = write_model(tmp_path / "model", DENSE, scale=0.02)
    recipe = game_recipe(steps=8, admission={"staleness_bound": bound, "pace_headroom": 0})
    for seed in range(4):
        world = World(tmp_path / f"run-{seed}", model)
        rng = np.random.default_rng(seed)
        lives = 0
        while await world.life(recipe).run_until_killed(events=int(rng.integers(1, 14))):
            lives += 1
            assert lives < 60
        assert lives > 0
        trained = [group for group, _ in trained_groups(world)]
        assert len(trained) == len(set(trained)) == 16
        # Every group that was ever played is accounted for.
        assert not [ledger.kept for ledger in world.ledgers.values() if ledger.kept]
        numbers = [version.number for version in world.weight_sync.versions]
        assert numbers == sorted(set(numbers))


async def test_finished_groups_survive_a_kill_and_are_not_sampled_again(world: World) -> None:
    recipe = game_recipe(steps=4, checkpoint={"every_steps": 1})
    life = world.life(recipe)
    # Killed right after a checkpoint: nothing on disk is behind anything published.
    checkpoints = 0
    task = asyncio.ensure_future(life.stage.run())
    async for event in life.context.events.follow(0):
        checkpoints += event.kind is EventKind.CHECKPOINT
        if checkpoints == 3:
            break
    task.cancel()
    await asyncio.wait({task})
    held = set(world.ledgers["e1"].kept)
    played = world.ledgers["e1"].played
    assert held
    resumed = world.life(recipe)
    await resumed.run()
    assigned = {a.key for _, a in resumed.engines.assigned}
    assert held <= assigned | set(world.ledgers["e1"].committed)
    assert all(key.epoch == 1 for key in world.ledgers["e1"].committed)
    assert world.ledgers["e1"].played >= played


async def test_engines_hear_a_decision_only_once_a_checkpoint_holds_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = world.life(game_recipe())
    commit = life.engines.commit
    store = CheckpointStore(world.folder / "checkpoints", stage="rl", keep=3)

    async def checked(engine: str, key: Any, decision: Decision, step: int) -> None:
        saved = store.read_newest()
        verdicts = saved.state["stage"]["flow"]["book"]["verdicts"]
        assert [key.group_id, key.epoch, engine, decision.value, step] in verdicts
        assert step <= saved.step
        await commit(engine, key, decision, step)

    monkeypatch.setattr(life.engines, "commit", checked)
    await life.run()
    assert decisions(world)["TRAINED"] == 12


async def test_a_finished_stage_gives_its_open_groups_up(world: World) -> None:
    life = world.life(game_recipe())
    life.engines.held_back = {"run-rl-000001"}
    await life.run()
    assert ("e1", "run-rl-000001") in [(e, k.group_id) for e, k in life.engines.withdrawn]
    assert world.ledgers["e1"].kept == {}
    assert decisions(world)["WITHDRAWN"] >= 1


async def test_a_finished_stage_gives_up_what_a_life_before_it_gave_out_unsaved(
    world: World,
) -> None:
    recipe = game_recipe(steps=3)
    first = world.life(recipe)
    await first.run(stop_after=1)
    forgotten = replace(first.engines.assigned[0][1], key=GroupKey("run-rl-000999", 1))
    resumed = world.life(recipe)
    resumed.engines.held_back = {"run-rl-000999"}  # so slow that the stage ends before
    await resumed.engines.assign("e1", forgotten)
    assert await resumed.run() is StageState.FINISHED
    assert ("e1", forgotten.key) in resumed.engines.withdrawn
    assert world.ledgers["e1"].committed[forgotten.key] == (Decision.WITHDRAWN, 0)


async def test_a_slow_group_blocks_no_step_and_its_old_tokens_are_masked(world: World) -> None:
    recipe = game_recipe(steps=6, admission={"staleness_bound": 1, "pace_headroom": 0})
    life = world.life(recipe)
    life.engines.held_back = {"run-rl-000000"}

    async def release() -> None:
        async for event in life.context.events.follow(0):
            if event.kind is EventKind.STEP and event.data["step"] == 4:
                life.engines.release("run-rl-000000")

    releasing = asyncio.ensure_future(release())
    assert await life.run() is StageState.FINISHED
    releasing.cancel()
    assert [step.data["step"] for step in life.steps()] == [1, 2, 3, 4, 5, 6]
    # All of its tokens are of version 1, four steps ago: nothing of it may be trained.
    committed = {k.group_id: d for k, (d, _) in world.ledgers["e1"].committed.items()}
    assert committed["run-rl-000000"] in (Decision.STALE, Decision.NO_VARIANCE)


def with_ages(group: FinishedGroup, older: int) -> FinishedGroup:
    """Make the first sampled token of each attempt come from an older version."""

    def aged(attempt: Attempt) -> Attempt:
        (segment,) = attempt.segments
        (span,) = segment.versions
        first = replace(span, end=2, version=max(1, span.version - older))
        return replace(
            attempt, segments=(replace(segment, versions=(first, replace(span, start=2))),)
        )

    return replace(group, attempts=tuple(aged(attempt) for attempt in group.attempts))


@pytest.mark.parametrize("over_bound", ["mask", "drop"])
async def test_tokens_beyond_the_bound_are_never_trained(world: World, over_bound: str) -> None:
    admission = {"staleness_bound": 1, "pace_headroom": 0, "over_bound": over_bound}
    recipe = game_recipe(steps=6, admission=admission)
    life = world.life(recipe, spoil=lambda group: with_ages(group, 3))
    if over_bound == "drop":
        # From version 3 on every group has a token that is too old.
        task = asyncio.ensure_future(life.run())
        async for event in life.context.events.follow(0):
            if event.kind is EventKind.STEP and event.data["step"] == 2:
                break
        for _ in range(3000):
            await asyncio.sleep(0)
        assert life.stage.step < 6
        task.cancel()
        await asyncio.wait({task})
        return
    assert await life.run() is StageState.FINISHED
    assert totals(life, "tokens_stale") > 0
    assert max(step.data["values"]["staleness.max"] for step in life.steps()) <= 1
    full = 6 * 2 * 4 * 3
    assert totals(life, "tokens_trained") == full - totals(life, "tokens_stale")


def spoiled(group: FinishedGroup, *indices: int, outcome: Outcome = Outcome.FAULT) -> FinishedGroup:
    fault = Fault(FaultStage.COMMAND, FaultCause.INJECTED, "injected")
    attempts = tuple(
        # A reward that would change every baseline, were it to count.
        replace(attempt, outcome=outcome, reward=99.0, segments=(), fault=fault)
        if attempt.id.index in indices
        else attempt
        for attempt in group.attempts
    )
    return replace(
        group,
        attempts=attempts,
        faulted_tries=tuple(FaultedTry(group.attempts[i].id, fault) for i in indices),
    )


@pytest.mark.parametrize("outcome", [Outcome.FAULT, Outcome.CANCELLED])
async def test_faults_are_never_trained_and_take_no_part_in_the_baseline(
    world: World, outcome: Outcome
) -> None:
    recipe = game_recipe(steps=4, group_size=6)
    life = world.life(recipe, spoil=lambda group: spoiled(group, 1, 4, outcome=outcome))
    await life.run()
    assert totals(life, "faults_trained") == 0
    assert totals(life, "attempts_trained") == 4 * 2 * 4
    assert totals(life, f"outcome.{outcome.value}") > 0
    assert totals(life, "fault.COMMAND.INJECTED") > 0
    assert all(step.data["values"]["reward.mean_trained"] <= 1 for step in life.steps())
    assert all(0 < step.data["values"]["advantage.abs_mean"] < 3 for step in life.steps())


async def test_a_group_with_one_valid_attempt_is_refused(world: World) -> None:
    def spoil(group: FinishedGroup) -> FinishedGroup:
        first = group.key.group_id.endswith("0")
        return spoiled(group, 0, 1, 2) if first else group

    life = world.life(game_recipe(steps=4), spoil=spoil)
    await life.run()
    assert decisions(world)["REFUSED"] >= 1


async def test_a_quarantined_task_is_drawn_no_more(world: World) -> None:
    fault = Fault(FaultStage.SANDBOX_START, FaultCause.IMAGE, "no such image")

    def spoil(group: FinishedGroup) -> FinishedGroup:
        if group.task_id != TASKS[3]:
            return group
        return replace(spoiled(group, 0, 1, 2, 3), quarantined=fault)

    life = world.life(game_recipe(steps=12), spoil=spoil)
    await life.run()
    tasks = Counter(assignment.task_id for _, assignment in life.engines.assigned)
    assert tasks[TASKS[3]] <= 2
    assert sum(tasks.values()) > 24
    assert f"task {TASKS[3]} is quarantined" in notes(life)


async def test_a_task_that_engines_do_not_know_is_left_out(world: World) -> None:
    life = world.life(game_recipe(steps=6))
    life.engines.refuse = {TASKS[0]: Reason.NOT_FOUND}
    assert await life.run() is StageState.FINISHED
    assert f"refuses task {TASKS[0]}" in notes(life)
    assert sum(a.task_id == TASKS[0] for _, a in life.engines.assigned) == 1


async def test_when_no_task_is_left_the_stage_fails_with_the_reason(world: World) -> None:
    life = world.life(game_recipe())
    life.engines.refuse = dict.fromkeys(TASKS, Reason.NOT_FOUND)
    with pytest.raises(ExceptionGroup) as failure:
        await life.run()
    assert failure.group_contains(Stalled, match="all 8 tasks are quarantined")


def with_bad_logprob(group: FinishedGroup, value: float) -> FinishedGroup:
    def damaged(attempt: Attempt) -> Attempt:
        (segment,) = attempt.segments
        logprobs = segment.logprobs.copy()
        logprobs[2] = value
        return replace(attempt, segments=(replace(segment, logprobs=logprobs),))

    return replace(group, attempts=(damaged(group.attempts[0]), *group.attempts[1:]))


async def test_a_group_with_log_probabilities_that_are_not_finite_is_refused(
    world: World,
) -> None:
    def spoil(group: FinishedGroup) -> FinishedGroup:
        bad = group.key.group_id.endswith("2")
        return with_bad_logprob(group, float("nan")) if bad else group

    life = world.life(game_recipe(steps=4), spoil=spoil)
    await life.run()
    assert "a log-probability is not finite" in notes(life)
    assert decisions(world)["REFUSED"] >= 1
    assert totals(life, "nonfinite_values") == 0


async def test_updates_that_are_not_finite_leave_the_weights_and_end_the_stage(
    world: World,
) -> None:
    recipe = game_recipe(
        minibatches=1,
        loss={"correction": {"weight": "token", "cap": float("inf")}},
        max_refused_updates=2,
    )
    # Finite, but the importance weight overflows.
    life = world.life(recipe, spoil=lambda group: with_bad_logprob(group, -1e30))
    before = life.weights()
    with pytest.raises(ExceptionGroup) as failure:
        await life.run()
    assert failure.group_contains(Stalled, match="2 updates in a row")
    assert life.weights() == before
    assert [version.step for version in world.weight_sync.versions] == [0]


async def test_a_silent_engines_groups_go_to_another_under_the_next_epoch(
    tmp_path: Path,
) -> None:
    model = write_model(tmp_path / "model", DENSE, scale=0.02)
    ledgers = {"e1": SimulatedLedger(), "e2": SimulatedLedger()}
    world = World(tmp_path / "run", model, ledgers=ledgers)
    life = world.life(game_recipe(steps=5, engine_lost_s=0.02))
    first = "run-rl-000000"
    life.engines.held_back = {first}

    async def lose_and_find() -> None:
        async for event in life.context.events.follow(0):
            if event.kind is EventKind.STEP and event.data["step"] == 1:
                (lost,) = {e for e, a in life.engines.assigned if a.key.group_id == first}
                life.engines.silent.add(lost)
            if event.kind is EventKind.NOTE and "fell silent" in event.data["text"]:
                # The partition heals, and what was thought lost arrives after all.
                life.engines.silent.clear()
                life.engines.release(first)

    watching = asyncio.ensure_future(lose_and_find())
    life.context.compute = slowly
    assert await life.run() is StageState.FINISHED
    watching.cancel()
    epochs = {a.key.epoch for _, a in life.engines.assigned if a.key.group_id == first}
    assert epochs == {1, 2}
    fates = {
        key.epoch: decision
        for ledger in ledgers.values()
        for key, (decision, _) in ledger.committed.items()
        if key.group_id == first
    }
    assert fates[1] is Decision.WITHDRAWN
    trained = [group for group, _ in trained_groups(world)]
    assert len(trained) == len(set(trained))


async def test_after_a_resume_the_groups_of_an_engine_that_is_gone_go_to_another(
    tmp_path: Path,
) -> None:
    model = write_model(tmp_path / "model", DENSE, scale=0.02)
    ledgers = {"e1": SimulatedLedger(), "e2": SimulatedLedger()}
    world = World(tmp_path / "run", model, ledgers=ledgers)
    recipe = game_recipe(steps=6, batch_groups=4)
    await world.life(recipe).run(stop_after=2)
    held = {key.group_id for key in ledgers["e1"].kept}
    assert held
    resumed = world.life(recipe)
    resumed.engines.silent = {"e1"}
    async with asyncio.timeout(20):
        assert await resumed.run() is StageState.FINISHED
    moved = {a.key for engine, a in resumed.engines.assigned if a.key.group_id in held}
    assert {key.epoch for key in moved} == {2}
    assert {engine for engine, _ in resumed.engines.assigned} == {"e2"}


async def test_the_last_step_does_not_wait_for_groups_that_are_far_too_slow(world: World) -> None:
    admission = {"staleness_bound": 3, "pace_headroom": 0}
    recipe = game_recipe(steps=3, batch_groups=2, admission=admission)
    life = world.life(recipe)
    # So many that the spare start of the last step is among them.
    life.engines.held_back = {f"run-rl-{ordinal:06d}" for ordinal in (3, 4, 5)}
    life.context.clock = lambda: 10.0 * len(life.engines.assigned) + 100.0 * life.stage.step
    async with asyncio.timeout(30):
        assert await life.run() is StageState.FINISHED


async def test_an_engine_without_room_is_tried_again(world: World) -> None:
    life = world.life(game_recipe(steps=3))
    life.engines.refuse = dict.fromkeys(TASKS[:4], Reason.DISK_FULL)

    async def make_room() -> None:
        async for event in life.context.events.follow(0):
            if event.kind is EventKind.NOTE:
                life.engines.refuse.clear()

    freeing = asyncio.ensure_future(make_room())
    async with asyncio.timeout(30):
        assert await life.run() is StageState.FINISHED
    freeing.cancel()
    assert notes(life).count("takes no group for now") == 1
    assert decisions(world)["REFUSED"] == 0


async def slowly(work: Any) -> Any:
    """Leave real time for the watch over engines."""
    await asyncio.sleep(0.05)
    return work()


async def test_groups_of_a_branch_that_a_kill_threw_away_are_judged_by_the_way_to_it(
    world: World,
) -> None:
    admission = {"staleness_bound": 3, "pace_headroom": 0}
    recipe = game_recipe(steps=9, checkpoint={"every_steps": 3}, admission=admission)
    life = world.life(recipe)
    task = asyncio.ensure_future(life.stage.run())
    async for event in life.context.events.follow(0):
        if event.kind is EventKind.STEP and event.data["step"] == 5:
            break
    task.cancel()
    await asyncio.wait({task})
    lost = {version.number for version in world.weight_sync.versions if version.step > 3}
    assert len(lost) == 2
    resumed = world.life(recipe)
    assert resumed.stage.step == 3
    assert await resumed.run() is StageState.FINISHED
    assert {key.epoch for key in world.ledgers["e1"].committed} == {1}, "a group was played again"
    sampled_by_lost_weights = totals(resumed, "tokens_off_lineage") // (4 * 3)
    assert 0 < decisions(world)["STALE"] < sampled_by_lost_weights, "the nearest are trained"


async def test_nothing_arriving_for_too_long_fails_with_the_engines_state(world: World) -> None:
    life = world.life(game_recipe(stall_s=5.0))
    life.engines.held_back = {f"run-rl-{ordinal:06d}" for ordinal in range(50)}
    now = iter(range(0, 10_000, 1))
    life.context.clock = lambda: float(next(now))
    with pytest.raises(ExceptionGroup) as failure:
        async with asyncio.timeout(20):
            await life.run()
    assert failure.group_contains(Stalled, match=r"no group arrived.*e1 \(connected")


async def test_a_time_limit_ends_the_stage_and_decays_the_rate(world: World) -> None:
    life = world.life(game_recipe(steps=1000, time_limit_s=60.0, optimizer={"warmup_steps": 0}))
    life.context.clock = lambda: 10.0 * life.stage.step
    assert await life.run() is StageState.FINISHED
    assert life.stage.step == 6
    scales = [step.data["values"]["learning_rate_scale"] for step in life.steps()]
    assert scales == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


async def test_every_step_says_where_its_time_went_and_what_it_trained(world: World) -> None:
    life = world.life(game_recipe(steps=3, recompute={"mode": "always"}))
    await life.run()
    for step in life.steps():
        values, counts = step.data["values"], step.data["counts"]
        for part in ("actor_update", "rollout_wait", "logprob_recompute", "weight_sync"):
            assert values[f"time.{part}_s"] >= 0
        assert values["time.logprob_recompute_s"] > 0
        assert counts["attempts_trained"] == 8
        assert counts["tokens_trained"] == 24
        assert sum(c for n, c in counts.items() if n.startswith("staleness.")) == 8
        assert counts["faults_trained"] == 0
    json.dumps([dict(step.data) for step in life.steps()], allow_nan=False)


async def test_engine_and_trainer_agree_on_tokens_of_the_same_version(world: World) -> None:
    life = world.life(game_recipe(steps=3))
    await life.run()
    compared = [s.data for s in life.steps() if s.data["counts"]["mismatch_tokens"]]
    assert compared
    assert all(data["values"]["mismatch.max"] < 1e-4 for data in compared)


async def test_checkpoints_are_model_folders_of_the_published_weights(world: World) -> None:
    life = world.life(game_recipe(steps=2))
    await life.run()
    newest = CheckpointStore(world.folder / "checkpoints", stage="rl", keep=3).newest()
    assert newest is not None
    fresh = World(world.folder / "again", newest)
    assert {n: np.asarray(t).tobytes() for n, t in world.weight_sync.weights.items()} == (
        fresh.life(game_recipe()).weights()
    )


def test_a_recipe_for_sync_needs_bound_zero() -> None:
    with pytest.raises(ValueError, match="staleness_bound = 0"):
        game_recipe(mode="sync")
    with pytest.raises(ValueError, match="either task_set or tasks"):
        GrpoConfig()
