"""RunGroups over a real channel: what is assigned comes back whole and once, whoever restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rollout_engine.client import ConsumerConfig, GroupConsumer
from rollout_engine.config import ConsumersConfig, RefillConfig, WorkConfig
from rollout_engine.core.tokens import check_segments
from rollout_engine.testing import MemoryEngine, ScriptTurn
from rollout_engine.types import (
    Assignment,
    Decision,
    FaultCause,
    FinishedGroup,
    GroupKey,
    Outcome,
    Purpose,
)
from service_kit.errors import Reason, ServiceError
from tailrace.rollout.v1 import rollout_service_pb2 as pb
from tailrace.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub

QUICK = WorkConfig(
    refills=RefillConfig(backoff_initial_s=0.001, backoff_max_s=0.01),
    consumers=ConsumersConfig(heartbeat_s=0.2, idle_s=5.0, progress_s=0.05, chunk_bytes=1024),
)


def solver(turn: ScriptTurn) -> str:
    task = turn.context.split("Write ")[1].split(".")[0]
    return ("cat task", f"write answer {task}", "submit")[turn.number]


def key(name: str = "g", epoch: int = 0) -> GroupKey:
    return GroupKey(name, epoch)


def group(name: str = "g", attempts: int = 2, epoch: int = 0, **options: object) -> Assignment:
    return Assignment(key(name, epoch), f"task-{name}", attempts, **options)  # type: ignore[arg-type]


@asynccontextmanager
async def consuming(
    engine: MemoryEngine, incarnation: int = 1, **options: object
) -> AsyncIterator[GroupConsumer]:
    config = ConsumerConfig(
        heartbeat_s=0.1, idle_s=5.0, reconnect_initial_s=0.01, reconnect_max_s=0.05
    )
    async with engine.channel() as channel:
        consumer = GroupConsumer(
            channel,
            consumer_id="trainer",
            purpose=Purpose.TRAINING,
            incarnation=incarnation,
            config=config,
            **options,  # type: ignore[arg-type]
        )
        connection = asyncio.create_task(consumer.run())
        try:
            yield consumer
        finally:
            connection.cancel()
            await asyncio.gather(connection, return_exceptions=True)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 -- what it waits for tells nobody
            await asyncio.sleep(0.005)


async def take(consumer: GroupConsumer, count: int) -> list[FinishedGroup]:
    async with asyncio.timeout(20):
        return [await consumer.next_finished() for _ in range(count)]


async def test_a_group_comes_back_whole(tmp_path: Path) -> None:
    async with MemoryEngine(tmp_path, solver, QUICK) as engine, consuming(engine) as consumer:
        await consumer.assign(group(attempts=3))
        assert consumer.outstanding == {key()}
        (finished,) = await take(consumer, 1)
        assert consumer.outstanding == set()
    assert (finished.key, finished.task_id, finished.quarantined) == (key(), "task-g", None)
    assert [a.id.index for a in finished.attempts] == [0, 1, 2]
    for attempt in finished.attempts:
        assert (attempt.outcome, attempt.reward, attempt.graded) == (Outcome.SOLVED, 1.0, True)
        assert (attempt.turns, attempt.diff) == (3, b"answer=task-g\n")
        check_segments(attempt.segments)
        assert attempt.policy_versions == (1,)
    assert engine.workspaces.living == set()


async def test_groups_come_in_the_order_in_which_they_finish(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def hook(kind: str, name: str) -> None:
        if kind == "grade" and name == "task-slow":
            await gate.wait()

    async with MemoryEngine(tmp_path, solver, QUICK, hook) as engine, consuming(engine) as consumer:
        for name in ("slow", "a", "b"):
            await consumer.assign(group(name))
        first = await take(consumer, 2)
        assert {g.key.group_id for g in first} == {"a", "b"}
        assert consumer.outstanding == {key("slow")}
        gate.set()
        (last,) = await take(consumer, 1)
        cursors = [g.cursor for g in (*first, last)]
        assert cursors == sorted(cursors)


async def test_one_slow_attempt_holds_up_its_own_group_alone(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def hook(kind: str, name: str) -> None:
        if kind == "generate" and name.startswith("slow@0/1."):
            await gate.wait()

    async with MemoryEngine(tmp_path, solver, QUICK, hook) as engine, consuming(engine) as consumer:
        await consumer.assign(group("slow"))
        names = [f"g{i}" for i in range(8)]
        for name in names:
            await consumer.assign(group(name))
        assert sorted(g.key.group_id for g in await take(consumer, 8)) == names
        gate.set()
        (slow,) = await take(consumer, 1)
        assert len(slow.valid_attempts) == 2


async def test_faults_are_refilled_and_never_become_a_grade(tmp_path: Path) -> None:
    kinds = ("task", "create", "generate", "run", "diff", "grade")
    calls = 0
    injected = 0

    async def hook(kind: str, name: str) -> None:
        nonlocal calls, injected
        if kind in kinds:
            calls += 1
            if calls % 10 == 3:
                injected += 1
                raise ServiceError(f"injected at {kind}", reason=Reason.INJECTED_FAULT)

    config = QUICK.model_copy(
        update={"refills": RefillConfig(per_attempt=50, per_group=500, backoff_initial_s=0.001)}
    )
    async with (
        MemoryEngine(tmp_path, solver, config, hook) as engine,
        consuming(engine) as consumer,
    ):
        for i in range(12):
            await consumer.assign(group(f"g{i}", attempts=4))
        groups = await take(consumer, 12)
        outcomes = engine.engine.supervisor.outcomes()
    assert injected >= 20
    assert outcomes == {"SOLVED": 48, "FAULT": injected}
    assert sum(len(g.faulted_tries) for g in groups) == injected
    for finished in groups:
        assert finished.quarantined is None
        assert [a.outcome for a in finished.attempts] == [Outcome.SOLVED] * 4
        for faulted in finished.faulted_tries:
            assert faulted.fault.cause is FaultCause.INJECTED
            final = finished.attempts[faulted.attempt.index]
            assert final.id.try_number > faulted.attempt.try_number


async def test_a_task_that_keeps_faulting_is_quarantined_with_what_is_valid(
    tmp_path: Path,
) -> None:
    async def hook(kind: str, name: str) -> None:
        if kind == "generate" and "@0/1." in name:
            raise ServiceError("no", reason=Reason.ENGINE_POISONED)

    async with MemoryEngine(tmp_path, solver, QUICK, hook) as engine, consuming(engine) as consumer:
        await consumer.assign(group(attempts=3))
        (finished,) = await take(consumer, 1)
        assert await engine.ledger.quarantined_tasks() == ["task-g"]
    assert finished.quarantined is not None
    assert finished.quarantined.cause is FaultCause.ENGINE
    assert [a.outcome for a in finished.attempts] == [
        Outcome.SOLVED,
        Outcome.FAULT,
        Outcome.SOLVED,
    ]
    assert len(finished.faulted_tries) == 4
    assert finished.attempts[1].segments == ()


async def test_credits_bound_what_is_assigned_and_return_with_the_receipt(tmp_path: Path) -> None:
    config = QUICK.model_copy(
        update={"consumers": QUICK.consumers.model_copy(update={"credits": 2})}
    )
    async with MemoryEngine(tmp_path, solver, config) as engine, consuming(engine) as consumer:
        await consumer.assign(group("a"))
        await consumer.assign(group("b"))
        third = asyncio.create_task(consumer.assign(group("c")))
        first, second = await take(consumer, 2)
        assert not third.done()
        await consumer.receive(first.cursor)
        await asyncio.wait_for(third, 10)
        await consumer.receive(second.cursor)
        assert (await take(consumer, 1))[0].key == key("c")


async def test_whoever_gives_up_waiting_for_a_group_does_not_lose_it(tmp_path: Path) -> None:
    async with MemoryEngine(tmp_path, solver, QUICK) as engine, consuming(engine) as consumer:
        for number in range(20):
            await consumer.assign(group(f"g{number}"))
            waiting = asyncio.create_task(consumer.next_finished())
            # Cancelled in the very turn of the loop in which the group arrives, or next to it.
            await until(lambda: not consumer.outstanding)
            waiting.cancel()
            await asyncio.wait([waiting])
            finished = (await take(consumer, 1))[0] if waiting.cancelled() else waiting.result()
            assert finished.key == key(f"g{number}")
            await consumer.receive(finished.cursor)


async def test_assigning_twice_runs_once(tmp_path: Path) -> None:
    async with MemoryEngine(tmp_path, solver, QUICK) as engine, consuming(engine) as consumer:
        await asyncio.gather(consumer.assign(group()), consumer.assign(group()))
        await take(consumer, 1)
        await consumer.assign(group())
        assert engine.workspaces.made == 2


async def test_a_stream_that_ends_while_a_group_is_accepted_does_not_strand_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with MemoryEngine(tmp_path, solver, QUICK) as engine:
        accept = engine.ledger.accept
        in_ledger, answer = asyncio.Event(), asyncio.Event()

        async def slow_accept(*arguments: Any, **options: Any) -> Any:
            acceptance = await accept(*arguments, **options)
            in_ledger.set()
            await answer.wait()
            return acceptance

        monkeypatch.setattr(engine.ledger, "accept", slow_accept)
        async with consuming(engine) as consumer:
            assigning = asyncio.create_task(consumer.assign(group()))
            await in_ledger.wait()
            assigning.cancel()
        async with engine.channel() as channel:
            stub = RolloutServiceStub(channel)
            async with asyncio.timeout(10):
                while (await stub.GetStatus(pb.GetStatusRequest(), timeout=5)).consumers:  # noqa: ASYNC110 -- it tells nobody
                    await asyncio.sleep(0.005)
        answer.set()
        async with consuming(engine, incarnation=2) as consumer:
            assert (await take(consumer, 1))[0].key == key()


async def test_an_older_epoch_is_refused_and_a_newer_one_replaces_it(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def hook(kind: str, name: str) -> None:
        if kind == "generate" and "@1/" in name:
            await gate.wait()

    async with MemoryEngine(tmp_path, solver, QUICK, hook) as engine, consuming(engine) as consumer:
        await consumer.assign(group(epoch=1))
        with pytest.raises(ServiceError) as caught:
            await consumer.assign(group(epoch=0))
        assert caught.value.reason is Reason.STALE_EPOCH
        await consumer.assign(group(epoch=2))
        (finished,) = await take(consumer, 1)
        assert finished.key.epoch == 2
        await until(lambda: engine.workspaces.living == set())


async def test_a_group_that_is_too_large_is_refused(tmp_path: Path) -> None:
    async with MemoryEngine(tmp_path, solver, QUICK) as engine, consuming(engine) as consumer:
        with pytest.raises(ServiceError, match="at most 256"):
            await consumer.assign(group(attempts=257))
        await consumer.assign(group())
        await take(consumer, 1)


async def test_withdrawing_cancels_engines_and_sandboxes_and_frees_the_credit(
    tmp_path: Path,
) -> None:
    async def hook(kind: str, name: str) -> None:
        if kind == "generate" and name.startswith("doomed@"):
            await asyncio.Event().wait()

    config = QUICK.model_copy(
        update={"consumers": QUICK.consumers.model_copy(update={"credits": 1})}
    )
    async with (
        MemoryEngine(tmp_path, solver, config, hook) as engine,
        consuming(engine) as consumer,
    ):
        await consumer.assign(group("doomed"))
        await until(lambda: len(engine.workspaces.living) == 2)
        await consumer.withdraw(key("doomed"), "not wanted")
        await consumer.assign(group("next"))
        await until(lambda: len(engine.policy.aborted) == 2)
        (finished,) = await take(consumer, 1)
        assert finished.key == key("next")
        assert engine.workspaces.living == set()
        assert engine.engine.supervisor.outcomes() == {"CANCELLED": 2, "SOLVED": 2}
        await consumer.commit(key("doomed"), Decision.WITHDRAWN)
        await consumer.settled()


async def test_a_consumer_that_resumes_gets_exactly_the_uncommitted_again(tmp_path: Path) -> None:
    async with MemoryEngine(tmp_path, solver, QUICK) as engine:
        async with consuming(engine) as consumer:
            for name in "abcd":
                await consumer.assign(group(name))
                (finished,) = await take(consumer, 1)
                await consumer.receive(finished.cursor)
                if name == "a":
                    saved = finished.cursor
            await consumer.commit(key("b"), Decision.TRAINED, step=1)
            await consumer.commit(key("a"), Decision.NO_VARIANCE)
            await consumer.settled()
            assert consumer.uncommitted == set()
        async with consuming(engine, incarnation=2, cursor=saved) as consumer:
            again = await take(consumer, 2)
            assert [g.key.group_id for g in again] == ["c", "d"]
            await consumer.assign(group("e"))
            assert (await take(consumer, 1))[0].key == key("e")


async def test_a_consumer_that_resumes_forgets_what_it_does_not_keep(tmp_path: Path) -> None:
    async def hook(kind: str, name: str) -> None:
        if kind == "generate" and name.startswith("running@"):
            await asyncio.Event().wait()

    async with MemoryEngine(tmp_path, solver, QUICK, hook) as engine:
        async with consuming(engine) as consumer:
            for name in ("kept", "dropped", "running"):
                await consumer.assign(group(name))
            await take(consumer, 2)
        async with consuming(engine, incarnation=2, keep=[key("kept")]) as consumer:
            assert (await take(consumer, 1))[0].key == key("kept")
            await until(lambda: engine.workspaces.living == set())
            await consumer.assign(group("dropped"))  # it is a new group now
            assert (await take(consumer, 1))[0].key == key("dropped")


async def test_a_restarted_engine_goes_on_and_its_consumer_reconnects(tmp_path: Path) -> None:
    gate = asyncio.Event()
    grades = 0

    async def hook(kind: str, name: str) -> None:
        nonlocal grades
        if kind == "grade":
            grades += 1
        if kind == "generate" and "/1." in name:
            await gate.wait()

    async with MemoryEngine(tmp_path, solver, QUICK, hook) as engine:
        address = engine.address
        async with consuming(engine) as consumer:
            await consumer.assign(group(attempts=3))
            await until(lambda: grades == 2)
            await until(lambda: engine.engine.supervisor.outcomes().get("SOLVED") == 2)
            await engine.stop()
            await until(lambda: not consumer.connected)
            gate.set()
            restarted = MemoryEngine(tmp_path, solver, QUICK, hook, bind=address)
            async with restarted:
                (finished,) = await take(consumer, 1)
                assert restarted.workspaces.made == 1
                assert [a.id.try_number for a in finished.attempts] == [0, 1, 0]
                causes = [f.fault.cause for f in finished.faulted_tries]
                assert causes == [FaultCause.RESTART]
                await consumer.commit(finished.key, Decision.TRAINED, 1)
                await consumer.settled()


async def test_a_replaced_ledger_gets_the_outstanding_groups_again(tmp_path: Path) -> None:
    async def hook(kind: str, name: str) -> None:
        if kind == "generate":
            await asyncio.Event().wait()

    first = MemoryEngine(tmp_path / "first", solver, QUICK, hook)
    await first.__aenter__()
    async with consuming(first) as consumer:
        await consumer.assign(group())
        await first.stop()
        async with MemoryEngine(tmp_path / "second", solver, QUICK, bind=first.address) as second:
            (finished,) = await take(consumer, 1)
            assert finished.key == key()
            assert consumer.engine_id == second.ledger.ledger_id


async def test_a_newer_incarnation_ends_the_older_one_for_good(tmp_path: Path) -> None:
    async with (
        MemoryEngine(tmp_path, solver, QUICK) as engine,
        consuming(engine) as old,
    ):
        await until(lambda: old.connected)
        async with consuming(engine, incarnation=2) as new:
            await until(lambda: new.connected)
            with pytest.raises(ServiceError) as caught:
                await asyncio.wait_for(old.next_finished(), 10)
            assert caught.value.reason is Reason.FENCED
            with pytest.raises(ServiceError):
                await old.assign(group())
            await new.assign(group())
            await take(new, 1)


async def test_two_consumers_have_groups_of_their_own(tmp_path: Path) -> None:
    async with MemoryEngine(tmp_path, solver, QUICK) as engine, engine.channel() as channel:
        consumers = [
            GroupConsumer(channel, consumer_id=name, purpose=purpose, incarnation=1)
            for name, purpose in (
                ("trainer", Purpose.TRAINING),
                ("evaluator", Purpose.EVALUATION),
            )
        ]
        runs = [asyncio.create_task(consumer.run()) for consumer in consumers]
        for consumer in consumers:
            await consumer.assign(group("same-id"))
        for consumer in consumers:
            (finished,) = await take(consumer, 1)
            assert finished.key == key("same-id")
        assert engine.workspaces.made == 4
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)


async def test_figures_of_the_engine_arrive_while_it_works(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def hook(kind: str, name: str) -> None:
        if kind == "run" and name.startswith("write"):
            await gate.wait()

    async with MemoryEngine(tmp_path, solver, QUICK, hook) as engine, consuming(engine) as consumer:
        await consumer.assign(group(attempts=2))

        def told() -> bool:
            figures = consumer.progress
            return figures is not None and figures.attempts_running == 2

        await until(told)
        figures = consumer.progress
        assert figures is not None
        assert (figures.groups_running, figures.attempts_queued) == (1, 0)
        await until(lambda: consumer.progress and consumer.progress.oldest_running_version == 1)
        figures = consumer.progress
        assert figures is not None
        assert figures.tokens_generated > 0
        gate.set()
        await take(consumer, 1)
        await until(lambda: consumer.progress and consumer.progress.outcomes == {"SOLVED": 2})


async def test_a_group_waits_for_the_version_it_demands(tmp_path: Path) -> None:
    async with MemoryEngine(tmp_path, solver, QUICK) as engine, consuming(engine) as consumer:
        await consumer.assign(group("later", min_version=3))
        await consumer.assign(group("now"))
        assert (await take(consumer, 1))[0].key == key("now")
        await engine.policy.update(2)
        assert engine.workspaces.made == 2
        await engine.policy.update(4)
        (later,) = await take(consumer, 1)
        assert later.attempts[0].policy_versions == (4,)


async def test_an_attempt_that_saw_another_version_than_its_pin_is_made_again(
    tmp_path: Path,
) -> None:
    async def hook(kind: str, name: str) -> None:
        if kind == "generate" and name.endswith("/0.0#1"):
            engine.policy.version = 6  # an update in the midst of the first try
        elif kind == "destroy":
            engine.policy.version = 5

    async with (
        MemoryEngine(tmp_path, solver, QUICK, hook, version=5) as engine,
        consuming(engine) as consumer,
    ):
        await consumer.assign(group(attempts=1, pin_version=5))
        (finished,) = await take(consumer, 1)
    assert finished.attempts[0].policy_versions == (5,)
    assert finished.attempts[0].id.try_number == 1
    assert [f.fault.cause for f in finished.faulted_tries] == [FaultCause.ENGINE]


async def test_a_pinned_version_that_is_gone_quarantines_the_group(tmp_path: Path) -> None:
    async with (
        MemoryEngine(tmp_path, solver, QUICK, version=9) as engine,
        consuming(engine) as consumer,
    ):
        await consumer.assign(group(pin_version=8))
        (finished,) = await take(consumer, 1)
    assert finished.quarantined is not None
    assert finished.quarantined.cause is FaultCause.ENGINE
    assert finished.valid_attempts == ()
    assert engine.workspaces.made == 0
