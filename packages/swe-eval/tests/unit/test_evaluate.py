"""Whole evaluations against played engines: what is assigned, counted and resumed."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_engine.types import (
    Assignment,
    Attempt,
    AttemptId,
    Decision,
    Fault,
    FaultCause,
    FaultedTry,
    FaultStage,
    FinishedGroup,
    GroupKey,
    Outcome,
    Segment,
    VersionSpan,
)
from service_kit.channel import ChannelConfig
from service_kit.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Reason,
    ServiceError,
    Unavailable,
    service_error,
)
from swe_eval.config import EvaluationConfig, GeneratedSetConfig
from swe_eval.core.evaluation import Plan, Progress, Report, VersionTokens
from swe_eval.engines import score_group
from swe_eval.evaluate import EvaluationRequest, Evaluator
from swe_eval.tasks.sets import Catalog, GeneratedSet

FAULT = Fault(FaultStage.GRADE, FaultCause.GRADER, "the grader is down")
REQUEST = EvaluationRequest(name="base", task_set="heldout", attempts=4, tasks=8, version=7)


def attempt(
    key: GroupKey, index: int, outcome: Outcome, reward: float, version: int, kv: int
) -> Attempt:
    segment = Segment(
        segment_id=0,
        parent_id=-1,
        token_ids=np.arange(3, dtype=np.int32),
        loss_mask=np.array([False, True, True]),
        logprobs=np.zeros(3, dtype=np.float32),
        versions=(VersionSpan(1, 3, version, kv),),
    )
    return Attempt(
        AttemptId(key, index), "t", outcome, reward=reward, graded=True, segments=(segment,)
    )


def group(
    assignment: Assignment, outcomes: Sequence[tuple[Outcome, float]], **more: Any
) -> FinishedGroup:
    version = more.pop("version", assignment.pin_version)
    kv = more.pop("kv", version)
    attempts = tuple(
        attempt(assignment.key, i, outcome, reward, version, kv)
        for i, (outcome, reward) in enumerate(outcomes)
    )
    return FinishedGroup(assignment.key, assignment.task_id, 0, attempts, **more)


HALF = [
    (Outcome.SOLVED, 1.0),
    (Outcome.LIMIT_REACHED, 1.0),
    (Outcome.UNSOLVED, 0.0),
    (Outcome.LIMIT_REACHED, 0.0),
]


class Engine:
    """A rollout-engine's ledger, kept over the lives of its consumers."""

    def __init__(self, play: Callable[[Assignment], FinishedGroup | ServiceError | None]) -> None:
        self.play = play
        self.running: dict[GroupKey, Assignment] = {}
        self.finished: list[FinishedGroup] = []
        self.decisions: dict[GroupKey, Decision] = {}
        self.withdrawn: list[GroupKey] = []
        self.assigned: list[Assignment] = []
        self.cursor = 0
        self.received = 0
        self.lives: list[tuple[str, int, int]] = []
        self.up = True

    def finish(self, done: FinishedGroup) -> None:
        self.cursor += 10
        self.running.pop(done.key, None)
        self.finished.append(dataclasses.replace(done, cursor=self.cursor))


class Consumer:
    def __init__(self, engine: Engine, consumer_id: str, incarnation: int, cursor: int) -> None:
        self.engine = engine
        self.seen = cursor
        self.last_contact_s = 0.0
        engine.lives.append((consumer_id, incarnation, cursor))

    @property
    def connected(self) -> bool:
        return self.engine.up

    @property
    def outstanding(self) -> frozenset[GroupKey]:
        waiting = {g.key for g in self.engine.finished if g.cursor > self.seen}
        return frozenset(self.engine.running.keys() | waiting)

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def assign(self, assignment: Assignment) -> None:
        while not self.engine.up:  # noqa: ASYNC110 -- played objects have no events
            await asyncio.sleep(0.01)
        self.engine.assigned.append(assignment)
        self.engine.running[assignment.key] = assignment
        played = self.engine.play(assignment)
        if isinstance(played, ServiceError):
            raise played
        if played is not None:
            self.engine.finish(played)

    async def next_finished(self) -> FinishedGroup:
        while True:
            for done in self.engine.finished:
                if self.engine.up and done.cursor > self.seen:
                    self.seen = done.cursor
                    return done
            await asyncio.sleep(0.005)

    async def receive(self, cursor: int) -> None:
        self.engine.received = max(self.engine.received, cursor)

    async def commit(self, key: GroupKey, decision: Decision, step: int = 0) -> None:
        self.engine.decisions[key] = decision

    async def withdraw(self, key: GroupKey, reason: str) -> None:
        self.engine.running.pop(key, None)
        self.engine.withdrawn.append(key)

    async def settled(self) -> None:
        return


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Evaluator]:
    def build(*engines: Engine, **settings: Any) -> Evaluator:
        by_target = {f"127.0.0.1:{i + 1}": engine for i, engine in enumerate(engines)}
        order = iter(list(by_target.values()) * 20)

        def connect(channel: Any, consumer_id: str, incarnation: int, cursor: int) -> Any:
            return Consumer(next(order), consumer_id, incarnation, cursor)

        config = EvaluationConfig(
            state_dir=tmp_path,
            rollout_targets=[ChannelConfig(target=target) for target in by_target],
            resamples=200,
            **settings,
        )
        heldout = GeneratedSet(GeneratedSetConfig(name="heldout", split="heldout", count=20))
        return Evaluator(Catalog([heldout]), config, make_consumer=connect)

    return build


async def report_of(evaluator: Evaluator, request: EvaluationRequest = REQUEST) -> Report:
    events = [event async for event in evaluator.evaluate(request)]
    report = events[-1]
    assert isinstance(report, Report)
    assert isinstance(events[0], Plan)
    assert events[0].list_digest == report.list_digest
    progress = [event for event in events[1:-1] if isinstance(event, Progress)]
    assert len(progress) == len(events) - 2
    assert [p.attempts_done for p in progress] == sorted(p.attempts_done for p in progress)
    return report


async def test_an_evaluation_scores_every_task_with_pinned_attempts(
    make: Callable[..., Evaluator],
) -> None:
    engine = Engine(lambda a: group(a, HALF))
    report = await report_of(make(engine))
    assert report.pass_at_1 == 0.5
    assert report.pass_at_k == 1.0
    assert (report.tasks, report.attempts) == (8, 4)
    assert report.outcomes == {"SOLVED": 8, "LIMIT_REACHED": 16, "UNSOLVED": 8}
    assert report.versions == (7,)
    assert {a.pin_version for a in engine.assigned} == {7}
    assert {a.attempts for a in engine.assigned} == {4}
    assert len({a.task_id for a in engine.assigned}) == 8
    assert set(engine.decisions.values()) == {Decision.SCORED}
    assert len(engine.decisions) == 8
    assert engine.received == engine.cursor


async def test_the_sample_is_stratified_by_kind_and_its_digest_is_reported(
    make: Callable[..., Evaluator],
) -> None:
    engine = Engine(lambda a: group(a, HALF))
    evaluator = make(engine)
    report = await report_of(evaluator)
    plan = evaluator.plan(REQUEST)
    assert [s.task_id for s in report.by_task] == list(plan.task_ids)
    assert report.list_digest == plan.list_digest
    assert max(stratum.tasks for stratum in report.strata) == 1
    other = evaluator.plan(dataclasses.replace(REQUEST, task_seed=1))
    assert other.list_digest != plan.list_digest


async def test_an_exact_list_is_measured_in_its_order_and_strata_are_of_the_columns_asked_for(
    make: Callable[..., Evaluator],
) -> None:
    evaluator = make()
    drawn = evaluator.plan(REQUEST)
    task_ids = drawn.task_ids[::-1][:3]
    listed = dataclasses.replace(
        REQUEST, tasks=0, task_ids=task_ids, stratify_by=("repository", "kind")
    )
    plan = evaluator.plan(listed)
    assert plan.task_ids == task_ids
    assert plan.stratified_by == ("repository", "kind")
    kinds = dict(zip(drawn.task_ids, drawn.strata, strict=True))
    assert [s.rpartition(" / ")[2] for s in plan.strata] == [kinds[t] for t in task_ids]
    with pytest.raises(InvalidArgument, match="is in the list twice"):
        evaluator.plan(dataclasses.replace(listed, task_ids=task_ids * 2))
    with pytest.raises(InvalidArgument, match="it has: kind, repository"):
        evaluator.plan(dataclasses.replace(listed, stratify_by=("colour",)))


async def test_what_counts_has_its_trajectories_and_nothing_else(
    make: Callable[..., Evaluator],
) -> None:
    def play(a: Assignment) -> FinishedGroup:
        return group(a, HALF if a.key.group_id.endswith(("0", "1")) else HALF[:3])

    evaluator = make(Engine(play), quarantine_retries=0)
    report = await report_of(evaluator)
    files = evaluator.trajectories("base")
    assert [f.name[:11] for f in files] == [f"{t:06d}-{i:04d}" for t in (0, 1) for i in range(4)]
    assert {report.by_task[0].task_id, report.by_task[1].task_id} == {
        f.stem.split("-", 2)[2] for f in files
    }
    assert evaluator.trajectories("base", after=files[5].name) == files[6:]
    with pytest.raises(NotFound, match="no evaluation 'other'"):
        evaluator.trajectories("other")


async def test_an_evaluation_begun_anew_does_not_keep_trajectories_of_the_one_before(
    make: Callable[..., Evaluator], tmp_path: Path
) -> None:
    evaluator = make(Engine(lambda a: group(a, HALF)))
    await report_of(evaluator)
    (tmp_path / "evaluations" / "base.jsonl").unlink()
    await report_of(make(Engine(lambda a: group(a, HALF))), dataclasses.replace(REQUEST, tasks=2))
    assert len(evaluator.trajectories("base")) == 8


async def test_a_group_that_keeps_faulting_is_run_again_then_reported_apart(
    make: Callable[..., Evaluator],
) -> None:
    broken: set[str] = set()

    def play(a: Assignment) -> FinishedGroup:
        tries = (FaultedTry(AttemptId(a.key, 0), FAULT),) * 3
        if not broken or a.task_id in broken:
            broken.add(a.task_id)
            faulted = [(Outcome.SOLVED, 1.0)] * 3 + [(Outcome.FAULT, 0.0)]
            return group(a, faulted, quarantined=FAULT, faulted_tries=tries)
        return group(a, HALF)

    engine = Engine(play)
    report = await report_of(make(engine, quarantine_retries=1))
    assert report.tasks == 7
    assert report.pass_at_1 == 0.5, "attempts of an incomplete group must not count"
    assert [q.task_id for q in report.quarantined] == list(broken)
    assert report.quarantined[0].reason == "GRADE, GRADER: the grader is down"
    assert report.outcomes["FAULT"] == 6
    assert report.faults == {"GRADE/GRADER": 6}
    epochs = [a.key.epoch for a in engine.assigned if a.task_id in broken]
    assert epochs == [0, 1]


async def test_an_evaluation_that_was_left_goes_on_where_it_stopped(
    make: Callable[..., Evaluator],
) -> None:
    played = 0

    def play(a: Assignment) -> FinishedGroup | None:
        nonlocal played
        played += 1
        return group(a, HALF) if played <= 3 else None

    engine = Engine(play)
    async with aclosing(make(engine).evaluate(REQUEST)) as events:
        async for event in events:
            if isinstance(event, Progress) and event.attempts_done == 12:
                break
    assert len(engine.running) == 5
    for assignment in list(engine.running.values())[:2]:  # these end while nobody listens
        engine.finish(group(assignment, HALF))
    engine.play = lambda a: pytest.fail("everything was assigned already")
    remaining = list(engine.running.values())
    evaluation = asyncio.ensure_future(report_of(make(engine)))
    await asyncio.sleep(0.05)
    for assignment in remaining:
        engine.finish(group(assignment, HALF))
    report = await evaluation
    assert (report.tasks, report.pass_at_1) == (8, 0.5)
    first, second = engine.lives
    assert first[0] == second[0]
    assert (first[1:], second[1:]) == ((1, 0), (2, 30))
    assert len(engine.assigned) == 8


async def test_a_finished_evaluation_answers_again_without_any_engine(
    make: Callable[..., Evaluator],
) -> None:
    engine = Engine(lambda a: group(a, HALF))
    first = await report_of(make(engine))
    again = await report_of(make())
    assert dataclasses.replace(again, wall_s=0.0) == dataclasses.replace(first, wall_s=0.0)


async def test_a_name_can_not_be_used_for_another_plan(make: Callable[..., Evaluator]) -> None:
    engine = Engine(lambda a: group(a, HALF))
    await report_of(make(engine))
    with pytest.raises(AlreadyExists, match="version is 7, not 8"):
        await report_of(make(engine), dataclasses.replace(REQUEST, version=8))


async def test_an_evaluation_runs_once_at_a_time(make: Callable[..., Evaluator]) -> None:
    engine = Engine(lambda a: None)
    evaluator = make(engine)
    first = evaluator.evaluate(REQUEST)
    await anext(first)
    with pytest.raises(FailedPrecondition, match="is running"):
        await report_of(evaluator)
    await first.aclose()
    engine.play = lambda a: group(a, HALF)
    assert (await report_of(evaluator)).tasks == 8


async def test_an_engine_that_goes_away_loses_its_tasks_to_the_others(
    make: Callable[..., Evaluator],
) -> None:
    silent = Engine(lambda a: None)
    steady = Engine(lambda a: group(a, HALF))
    evaluation = asyncio.ensure_future(
        report_of(make(silent, steady, reassign_s=0.2, groups_in_flight=2))
    )
    while len(silent.running) < 2:  # noqa: ASYNC110 -- played objects have no events
        await asyncio.sleep(0.01)
    silent.up = False
    report = await evaluation
    assert report.tasks == 8
    moved = [a for a in steady.assigned if a.key.epoch == 1]
    assert len(moved) == 2
    assert {a.key.group_id for a in moved} == {k.group_id for k in silent.withdrawn}


async def test_without_any_engine_it_fails_after_a_while_and_says_what_to_do(
    make: Callable[..., Evaluator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swe_eval.evaluation_run._MEET_S", 0.05)
    engine = Engine(lambda a: None)
    engine.up = False
    with pytest.raises(Unavailable, match="start a rollout-engine") as caught:
        await report_of(make(engine, idle_s=0.2))
    assert caught.value.retryable


async def test_a_refused_assignment_ends_the_evaluation_with_the_engines_words(
    make: Callable[..., Evaluator],
) -> None:
    engine = Engine(lambda a: service_error(Reason.INVALID_ARGUMENT, "no such task here"))
    with pytest.raises(InvalidArgument, match="no such task here"):
        await report_of(make(engine))


async def test_a_service_that_stops_ends_its_evaluations_with_an_error_to_retry(
    make: Callable[..., Evaluator],
) -> None:
    evaluator = make(Engine(lambda a: None))
    evaluation = asyncio.ensure_future(report_of(evaluator))
    await asyncio.sleep(0.05)
    evaluator.stop()
    with pytest.raises(Unavailable) as caught:
        await evaluation
    assert caught.value.reason is Reason.DRAINING


async def test_tokens_of_another_version_than_the_pinned_one_are_not_counted(
    make: Callable[..., Evaluator],
) -> None:
    engine = Engine(lambda a: group(a, HALF, version=6))
    report = await report_of(make(engine, quarantine_retries=0))
    assert report.tasks == 0
    assert "versions [6] though 7 was pinned" in report.quarantined[0].reason


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"task_set": "nope"}, NotFound),
        ({"name": "../x"}, InvalidArgument),
        ({"attempts": 0}, InvalidArgument),
        ({"tasks": 21}, InvalidArgument),
        ({"temperature": -1.0}, InvalidArgument),
        ({"top_p": 1.5}, InvalidArgument),
        ({"stratify_by": ("kind", "colour")}, InvalidArgument),
        ({"tasks": 0, "task_ids": ("nobody",)}, InvalidArgument),
        ({"task_ids": ("heldout-0",)}, InvalidArgument),
    ],
)
async def test_a_wrong_request_is_refused(
    make: Callable[..., Evaluator], changes: dict[str, Any], error: type[ServiceError]
) -> None:
    with pytest.raises(error):
        await report_of(make(), dataclasses.replace(REQUEST, **changes))


def test_missing_attempts_are_a_problem_of_the_group() -> None:
    assignment = Assignment(GroupKey("g", 0), "t", 4)
    plan = Plan(
        name="x", task_set="y", task_ids=("t",), strata=("",), stratified_by=(), task_seed=0,
        attempts=4, version=0, temperature=1.0, top_p=1.0, sampling_seed=0, list_digest="",
    )  # fmt: skip
    found = score_group(group(assignment, HALF[:3], version=5), plan)
    assert found.problem == "only 3 of 4 attempts are valid"
    whole = score_group(group(assignment, HALF, version=5), plan)
    assert (whole.problem, whole.solved, whole.valid) == ("", 2, 4)
    assert whole.version_tokens == (VersionTokens(version=5, oldest_kv_version=5, tokens=8),)


def test_a_pinned_group_may_not_attend_to_keys_of_other_weights() -> None:
    plan = Plan(
        name="x", task_set="y", task_ids=("t",), strata=("",), stratified_by=(), task_seed=0,
        attempts=4, version=7, temperature=1.0, top_p=1.0, sampling_seed=0, list_digest="",
    )  # fmt: skip
    found = score_group(group(Assignment(GroupKey("g", 0), "t", 4), HALF, version=7, kv=6), plan)
    assert "keys of, versions [6, 7] though 7 was pinned" in found.problem
