"""The agent loop end to end: every limit is recorded, time is counted fairly, nothing leaks."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from rollout_engine.client import ConsumerConfig, GroupConsumer
from rollout_engine.config import ConcurrencyConfig, DeadlineConfig, RefillConfig, WorkConfig
from rollout_engine.testing import Hook, MemoryEngine, ScriptTurn, byte_template, no_hook
from rollout_engine.types import (
    Assignment,
    Attempt,
    AttemptLimits,
    FaultCause,
    FaultStage,
    FinishedGroup,
    GroupKey,
    LimitKind,
    Outcome,
    Purpose,
    Sampling,
)
from service_kit.errors import Reason, ServiceError

QUICK = WorkConfig(
    refills=RefillConfig(backoff_initial_s=0.001, backoff_max_s=0.01),
    deadlines=DeadlineConfig(patience_s=0),
)
Script = Callable[[ScriptTurn], str]


def saying(*texts: str) -> Script:
    """A policy that says these, and the last one for ever."""
    return lambda turn: texts[min(turn.number, len(texts) - 1)]


@asynccontextmanager
async def engine_of(
    folder: Path, script: Script, hook: Hook = no_hook, config: WorkConfig = QUICK
) -> AsyncIterator[tuple[MemoryEngine, GroupConsumer]]:
    async with MemoryEngine(folder, script, config, hook) as engine, engine.channel() as channel:
        consumer = GroupConsumer(
            channel,
            consumer_id="me",
            purpose=Purpose.TRAINING,
            incarnation=1,
            config=ConsumerConfig(heartbeat_s=0.1, reconnect_initial_s=0.01),
        )
        connection = asyncio.create_task(consumer.run())
        try:
            yield engine, consumer
        finally:
            connection.cancel()
            await asyncio.gather(connection, return_exceptions=True)


async def run_group(consumer: GroupConsumer, attempts: int = 1, **options: object) -> FinishedGroup:
    assignment = Assignment(GroupKey("g", 0), "t", attempts, **options)  # type: ignore[arg-type]
    async with asyncio.timeout(20):
        await consumer.assign(assignment)
        return await consumer.next_finished()


async def run_one(folder: Path, script: Script, hook: Hook = no_hook, **options: object) -> Attempt:
    async with engine_of(folder, script, hook) as (_, consumer):
        return (await run_group(consumer, 1, **options)).attempts[0]


@pytest.mark.parametrize(
    ("limit", "limits", "script"),
    [
        (LimitKind.TURNS, AttemptLimits(turns=3), saying("cat task", "cat b", "cat c", "cat d")),
        (LimitKind.TURN_TOKENS, AttemptLimits(turn_tokens=5), saying("cat a long name")),
        (LimitKind.TOTAL_TOKENS, AttemptLimits(total_tokens=12), saying("cat task", "cat other")),
        (LimitKind.CONTEXT, AttemptLimits(context_tokens=90), saying("cat task", "cat other")),
        (LimitKind.COMMAND_TIME, AttemptLimits(command_time_s=5), saying("sleep 3")),
        (LimitKind.NO_PROGRESS, AttemptLimits(repeated_actions=3), saying("cat task")),
        (LimitKind.NO_PROGRESS, AttemptLimits(), saying(" ")),
    ],
)
async def test_a_policy_that_uses_up_a_limit_is_told_apart_by_the_limit(
    tmp_path: Path, limit: LimitKind, limits: AttemptLimits, script: Script
) -> None:
    attempt = await run_one(tmp_path, script, limits=limits)
    assert (attempt.outcome, attempt.limit) == (Outcome.LIMIT_REACHED, limit)
    assert (attempt.reward, attempt.graded, attempt.grade_reason) == (0.0, False, "empty_diff")
    (segment,) = attempt.segments
    if limits.total_tokens:
        assert segment.sampled_tokens <= limits.total_tokens
    if limits.context_tokens:
        assert len(segment) <= limits.context_tokens
    if limits.turns:
        assert attempt.turns == limits.turns


async def test_an_attempt_at_its_limit_is_graded_if_it_left_a_diff(tmp_path: Path) -> None:
    script = saying("write answer t", "cat a", "cat b")
    attempt = await run_one(tmp_path, script, limits=AttemptLimits(turns=2))
    assert (attempt.outcome, attempt.limit) == (Outcome.LIMIT_REACHED, LimitKind.TURNS)
    assert (attempt.reward, attempt.graded) == (1.0, True)


async def test_the_last_turns_command_still_counts(tmp_path: Path) -> None:
    attempt = await run_one(tmp_path, saying("write answer t"), limits=AttemptLimits(turns=1))
    assert (attempt.outcome, attempt.reward) == (Outcome.LIMIT_REACHED, 1.0)
    assert attempt.segments[0].loss_mask[-1]  # and nothing follows what the policy said last


@pytest.mark.parametrize(
    ("script", "graded", "reason"),
    [
        (saying("submit"), False, "empty_diff"),
        (saying("write answer wrong", "submit"), True, "tests_failed"),
    ],
)
async def test_an_attempt_that_solves_nothing_is_unsolved(
    tmp_path: Path, script: Script, graded: bool, reason: str
) -> None:
    attempt = await run_one(tmp_path, script)
    assert (attempt.outcome, attempt.reward) == (Outcome.UNSOLVED, 0.0)
    assert (attempt.graded, attempt.grade_reason) == (graded, reason)


async def test_the_policys_clock_counts_its_commands_alone(tmp_path: Path) -> None:
    async def hook(kind: str, name: str) -> None:
        await asyncio.sleep(0.05)  # everything else is slow

    script = saying("sleep 0.01", "cat task", "write answer t", "submit")
    limits = AttemptLimits(command_time_s=0.04)
    attempt = await run_one(tmp_path, script, hook, limits=limits)
    assert attempt.outcome is Outcome.SOLVED
    assert attempt.timing.command_s == pytest.approx(0.03)
    assert attempt.timing.generate_s > 0.15


async def test_a_command_that_runs_into_its_own_timeout_is_no_limit(tmp_path: Path) -> None:
    config = QUICK.model_copy(update={"deadlines": DeadlineConfig(command_s=2.0, patience_s=0)})
    script = saying("sleep 60", "write answer t", "submit")
    async with engine_of(tmp_path, script, config=config) as (_, consumer):
        attempt = (await run_group(consumer)).attempts[0]
    assert attempt.outcome is Outcome.SOLVED
    assert attempt.timing.command_s == pytest.approx(2.01)
    assert "[stopped after 2 s]" in text_of(attempt)


def text_of(attempt: Attempt) -> str:
    return byte_template().text(attempt.segments[0].token_ids)


async def test_tokens_are_those_the_policy_saw_and_sampled(tmp_path: Path) -> None:
    contexts: list[str] = []

    def script(turn: ScriptTurn) -> str:
        contexts.append(turn.context)
        return ("cat task", "cat nothing", "submit")[turn.number]

    attempt = await run_one(tmp_path, script)
    text = text_of(attempt)
    assert [text.startswith(context) for context in contexts] == [True] * 3
    assert contexts[1].endswith(
        "<|im_start|>assistant\ncat task<|im_end|>\n<|im_start|>user\nt<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert "no such file\n[exit code 1]" in contexts[2]
    (segment,) = attempt.segments
    said = byte_template().text(segment.token_ids[segment.loss_mask])
    assert said == "cat task<|im_end|>cat nothing<|im_end|>submit"
    assert np.array_equal(segment.logprobs != 0, segment.loss_mask)


async def test_every_attempt_and_turn_draws_with_a_seed_of_its_own(tmp_path: Path) -> None:
    seeds: dict[tuple[str, int], int] = {}

    def script(turn: ScriptTurn) -> str:
        seeds[turn.session, turn.number] = turn.seed
        return ("cat task", "submit")[turn.number]

    async with engine_of(tmp_path / "a", script) as (_, consumer):
        await run_group(consumer, attempts=4, sampling=Sampling(seed=7))
    first, seeds = seeds, {}
    assert len(set(first.values())) == 8
    async with engine_of(tmp_path / "b", script) as (_, consumer):
        await run_group(consumer, attempts=4, sampling=Sampling(seed=7))
    assert seeds == first


@pytest.mark.parametrize(
    ("kind", "stage", "cause"),
    [
        ("task", FaultStage.TASK, FaultCause.NETWORK),
        ("create", FaultStage.SANDBOX_START, FaultCause.NETWORK),
        ("generate", FaultStage.GENERATE, FaultCause.ENGINE),
        ("run", FaultStage.COMMAND, FaultCause.NETWORK),
        ("diff", FaultStage.DIFF, FaultCause.NETWORK),
        ("grade", FaultStage.GRADE, FaultCause.NETWORK),
    ],
)
async def test_a_failure_at_any_stage_is_a_fault_that_names_it_and_leaks_no_sandbox(
    tmp_path: Path, kind: str, stage: FaultStage, cause: FaultCause
) -> None:
    failed = False

    async def hook(what: str, name: str) -> None:
        nonlocal failed
        if what == kind and not failed:
            failed = True
            raise ServiceError("down", reason=Reason.UNAVAILABLE)

    async with engine_of(tmp_path, saying("write answer t", "submit"), hook) as (engine, consumer):
        finished = await run_group(consumer)
        assert engine.workspaces.living == set()
    assert [(f.fault.stage, f.fault.cause) for f in finished.faulted_tries] == [(stage, cause)]
    assert finished.attempts[0].outcome is Outcome.SOLVED


async def test_a_bug_of_ours_is_a_fault_too(tmp_path: Path) -> None:
    def script(turn: ScriptTurn) -> str:
        if turn.session.endswith(".0"):
            raise ZeroDivisionError("ours")
        return "submit"

    async with engine_of(tmp_path, script) as (_, consumer):
        finished = await run_group(consumer)
    (faulted,) = finished.faulted_tries
    assert (faulted.fault.stage, faulted.fault.cause) == (FaultStage.GENERATE, FaultCause.BUG)
    assert faulted.fault.message == "ZeroDivisionError: ours"


async def test_tokens_of_a_faulted_try_are_counted_and_not_kept(tmp_path: Path) -> None:
    async def hook(kind: str, name: str) -> None:
        if kind == "grade":
            raise ServiceError("no", reason=Reason.INTERNAL)

    async with engine_of(tmp_path, saying("write answer t", "submit"), hook) as (_, consumer):
        finished = await run_group(consumer)
    assert {f.tokens for f in finished.faulted_tries} == {len("write answer t") + len("submit") + 2}
    assert finished.attempts[0].segments == ()
    assert finished.attempts[0].fault is not None


async def test_an_engine_that_restarts_is_waited_for(tmp_path: Path) -> None:
    downs = 2

    async def hook(kind: str, name: str) -> None:
        nonlocal downs
        if kind == "generate" and downs:
            downs -= 1
            raise ServiceError("down", reason=Reason.UNAVAILABLE)

    config = QUICK.model_copy(update={"deadlines": DeadlineConfig(patience_s=30)})
    script = saying("write answer t", "submit")
    async with engine_of(tmp_path, script, hook, config) as (_, consumer):
        finished = await run_group(consumer)
    assert downs == 0
    assert finished.faulted_tries == ()
    assert finished.attempts[0].outcome is Outcome.SOLVED


async def test_attempts_at_once_are_limited_and_the_oldest_group_goes_first(
    tmp_path: Path,
) -> None:
    running = peak = 0
    order: list[str] = []

    async def hook(kind: str, name: str) -> None:
        nonlocal running, peak
        if kind == "create":
            running += 1
            peak = max(peak, running)
        elif kind == "generate":
            order.append(name.split("@")[0])
            await asyncio.sleep(0)
        elif kind == "destroy":
            running -= 1

    config = QUICK.model_copy(update={"concurrency": ConcurrencyConfig(attempts=2)})
    async with engine_of(tmp_path, saying("submit"), hook, config) as (engine, consumer):
        for name in "abc":
            await consumer.assign(Assignment(GroupKey(name, 0), "t", 4))
        async with asyncio.timeout(20):
            for _ in range(3):
                await consumer.next_finished()
        (attempts, *_) = engine.engine.limiters()
        assert (attempts.name, attempts.limit, attempts.in_use) == ("attempts", 2, 0)
    assert peak == 2
    assert order == sorted(order)


async def test_a_full_disk_keeps_finished_work_and_refuses_new_groups(tmp_path: Path) -> None:
    full = asyncio.Event()
    graded = asyncio.Event()

    def probe(point: str) -> None:
        if full.is_set() and point == "written":
            raise OSError(errno.ENOSPC, "No space left on device")

    async def hook(kind: str, name: str) -> None:
        if kind == "grade":
            full.set()
            graded.set()

    async with engine_of(tmp_path, saying("write answer t", "submit"), hook) as (engine, consumer):
        engine.ledger._probe = probe
        await consumer.assign(Assignment(GroupKey("g", 0), "t", 1))
        await graded.wait()
        with pytest.raises(ServiceError) as caught:
            await consumer.assign(Assignment(GroupKey("h", 0), "t", 1))
        assert caught.value.reason is Reason.DISK_FULL
        full.clear()
        async with asyncio.timeout(20):
            finished = await consumer.next_finished()
        assert finished.attempts[0].outcome is Outcome.SOLVED
        assert finished.faulted_tries == ()
