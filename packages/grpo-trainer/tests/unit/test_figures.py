from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from grpo_trainer.core.figures import ArrivalWindow, batch_counts, staleness_values
from grpo_trainer.core.groups import Ages, TrainableAttempt, TrainableGroup, valid_attempts
from rollout_engine.types import (
    Attempt,
    AttemptId,
    AttemptTiming,
    Decision,
    Fault,
    FaultCause,
    FaultedTry,
    FaultStage,
    FinishedGroup,
    GroupKey,
    LimitKind,
    Outcome,
    Segment,
    VersionSpan,
)

KEY = GroupKey("g-000000", 1)
FAULT = Fault(FaultStage.GRADE, FaultCause.GRADER)


def attempt(index: int, outcome: Outcome, *, tokens: int = 4, total_s: float = 1.0) -> Attempt:
    mask = np.arange(tokens) > 0
    logprobs = np.zeros(tokens, np.float32)
    spans = (VersionSpan(1, tokens, 1, 1),)
    return Attempt(
        AttemptId(KEY, index),
        "t",
        outcome,
        reward=float(outcome is Outcome.SOLVED),
        turns=2,
        segments=(Segment(0, -1, np.zeros(tokens, np.int32), mask, logprobs, spans),),
        timing=AttemptTiming(total_s=total_s),
    )


def window(*attempts: Attempt, faulted: int = 0) -> ArrivalWindow:
    tries = tuple(FaultedTry(AttemptId(KEY, 0, n), FAULT) for n in range(faulted))
    made = ArrivalWindow()
    made.arrived(FinishedGroup(KEY, "t", 1, attempts, faulted_tries=tries))
    return made


def test_rewards_and_lengths_are_of_valid_attempts_alone() -> None:
    found = window(
        attempt(0, Outcome.SOLVED, tokens=10),
        attempt(1, Outcome.UNSOLVED, tokens=20),
        attempt(2, Outcome.LIMIT_REACHED, tokens=30),
        attempt(3, Outcome.FAULT, tokens=1000),
        attempt(4, Outcome.CANCELLED, tokens=1000),
    )
    values = found.values()
    assert values["reward.mean"] == pytest.approx(1 / 3)
    assert values["tokens.max"] == 30
    assert values["tokens.p50"] == 20
    assert values["sampled_tokens.p50"] == 19
    assert values["rate.limit"] == pytest.approx(1 / 3)
    assert {name: count for name, count in found.counts.items() if "outcome" in name} == {
        "outcome.SOLVED": 1,
        "outcome.UNSOLVED": 1,
        "outcome.LIMIT_REACHED": 1,
        "outcome.FAULT": 1,
        "outcome.CANCELLED": 1,
    }


def test_the_tail_is_the_share_of_time_after_nine_in_ten_had_finished() -> None:
    quick = [attempt(i, Outcome.SOLVED, total_s=10.0) for i in range(10)]
    slow = attempt(10, Outcome.UNSOLVED, total_s=40.0)
    assert window(*quick, slow).values()["duration.tail_ratio"] == pytest.approx(0.75)
    assert window(*quick).values()["duration.tail_ratio"] == 0.0


def test_the_fault_rate_is_of_all_tries() -> None:
    found = window(attempt(0, Outcome.SOLVED), attempt(1, Outcome.UNSOLVED), faulted=3)
    assert found.values()["rate.fault"] == pytest.approx(3 / 5)
    assert found.counts["fault.GRADE.GRADER"] == 3


def test_limits_and_skips_are_counted_by_name() -> None:
    found = window(replace(attempt(0, Outcome.LIMIT_REACHED), limit=LimitKind.TURNS))
    for decision in (Decision.TRAINED, Decision.NO_VARIANCE, Decision.NO_VARIANCE, Decision.STALE):
        found.decided(decision)
    assert found.counts["limit.TURNS"] == 1
    assert found.counts["decision.NO_VARIANCE"] == 2
    assert found.values()["rate.skip"] == 0.5


def test_a_window_without_arrivals_has_no_figures() -> None:
    assert ArrivalWindow().values() == {}


def batch(*token_ages: list[int], bound: int) -> tuple[TrainableGroup, Ages]:
    attempts = tuple(
        attempt(i, Outcome.SOLVED, tokens=len(ages) + 1) for i, ages in enumerate(token_ages)
    )
    finished = FinishedGroup(KEY, "t", 1, attempts)
    by_attempt = tuple((np.array([0, *ages]),) for ages in token_ages)
    masked = sum(age > bound for ages in token_ages for age in ages)
    fresh = tuple((np.zeros(len(ages) + 1, np.bool_),) for ages in token_ages)
    total = sum(map(len, token_ages))
    return (
        TrainableGroup(finished, 0, valid_attempts(finished)),
        Ages(by_attempt, fresh, masked, total),
    )


def test_staleness_is_that_of_the_oldest_token_that_is_trained() -> None:
    group, ages = batch([0, 0], [2, 1], [3, 1], [3, 4], bound=2)
    assert batch_counts([group], [ages], bound=2) == {
        "groups_trained": 1,
        "faults_trained": 0,
        "tokens_stale": 3,
        "staleness.0": 1,
        "staleness.1": 1,
        "staleness.2": 1,
    }
    values = staleness_values([group], [ages], bound=2)
    assert values["staleness.mean"] == 1.0
    assert values["staleness.max"] == 2.0
    assert values["staleness.token_mean"] == pytest.approx(4 / 5)


def test_a_fault_in_a_batch_would_be_counted() -> None:
    group, ages = batch([0], [0], bound=1)
    (first, second) = group.attempts
    smuggled = TrainableAttempt(
        replace(second.attempt, outcome=Outcome.FAULT), 1.0, second.sequences
    )
    tampered = replace(group, attempts=(first, smuggled))
    assert batch_counts([tampered], [ages], bound=1)["faults_trained"] == 1
