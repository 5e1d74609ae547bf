"""Admission against a simulation of engines and trainer under virtual time."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from grpo_trainer.core.admission import (
    AdmissionRules,
    Blocked,
    Hold,
    Outstanding,
    Pace,
    Pipeline,
    Start,
    Wait,
    count_overdue,
    next_start,
)
from hypothesis import given, settings
from hypothesis import strategies as st


@dataclass(order=True)
class Event:
    at_s: float
    order: int
    kind: str = field(compare=False)
    group: int = field(compare=False, default=-1)


@dataclass
class Run:
    """What a simulated stage did."""

    starts: list[float] = field(default_factory=list)
    start_step: dict[int, int] = field(default_factory=dict)
    staleness: list[int] = field(default_factory=list)
    steps: list[tuple[float, list[int]]] = field(default_factory=list)
    busy_s: float = 0.0
    overtaken: int = 0


def simulate(
    rules: AdmissionRules,
    durations: Iterator[float],
    *,
    steps: int,
    step_s: float,
    skips: Callable[[int], bool] = lambda group: False,
) -> Run:
    """Drive `next_start` with engines of unlimited room and a trainer that takes oldest first."""
    run = Run()
    order = iter(range(1_000_000))
    events: list[Event] = []
    now_s, step, training = 0.0, 0, False
    in_flight: set[int] = set()
    ready: set[int] = set()
    pace = Pace().stepped(0.0)
    batch: list[int] = []
    groups = 0
    waits: set[float] = set()

    def pipeline() -> Pipeline:
        return Pipeline(
            step=step,
            training=training,
            in_flight=len(in_flight),
            ready=len(ready),
            steps_left=steps - step - training,
        )

    while step < steps:
        while isinstance(decision := next_start(rules, pipeline(), pace, now_s), Start):
            assert decision.min_step <= step
            pace = pace.started(now_s)
            run.starts.append(now_s)
            run.start_step[groups] = step
            in_flight.add(groups)
            heapq.heappush(events, Event(now_s + next(durations), next(order), "done", groups))
            groups += 1
        if isinstance(decision, Wait) and decision.until_s not in waits:
            waits.add(decision.until_s)
            heapq.heappush(events, Event(decision.until_s, next(order), "wake"))
        if not training and len(ready) >= rules.batch_groups:
            batch = sorted(ready)[: rules.batch_groups]
            ages = [step - run.start_step[group] for group in batch]
            run.staleness += ages
            run.overtaken += sum(age > rules.staleness_bound for age in ages)
            ready -= set(batch)
            training = True
            pace = pace.used(len(batch))
            run.busy_s += step_s
            heapq.heappush(events, Event(now_s + step_s, next(order), "stepped"))
            continue
        event = heapq.heappop(events)
        now_s = event.at_s
        if event.kind == "done":
            in_flight.remove(event.group)
            if skips(event.group):
                pace = pace.used(1)
            else:
                ready.add(event.group)
        elif event.kind == "stepped":
            step, training = step + 1, False
            run.steps.append((now_s, batch))
            pace = pace.stepped(now_s)
    return run


def constant(seconds: float) -> Iterator[float]:
    while True:
        yield seconds


@given(
    batch=st.integers(1, 6),
    bound=st.integers(0, 4),
    seconds=st.floats(0.1, 20),
    step_s=st.floats(0.1, 5),
    skip_every=st.integers(0, 4),
    headroom=st.sampled_from([0.0, 1.0, 1.5, 4.0]),
)
@settings(max_examples=60)
def test_staleness_never_exceeds_the_bound_when_groups_finish_in_order(
    batch: int, bound: int, seconds: float, step_s: float, skip_every: int, headroom: float
) -> None:
    rules = AdmissionRules(batch_groups=batch, staleness_bound=bound, pace_headroom=headroom)
    run = simulate(
        rules,
        constant(seconds),
        steps=8,
        step_s=step_s,
        skips=lambda group: bool(skip_every) and group % (skip_every + 1) == 0,
    )
    assert len(run.steps) == 8
    assert max(run.staleness) <= bound


@given(
    batch=st.integers(1, 6),
    bound=st.integers(0, 3),
    durations=st.lists(st.floats(0.1, 30), min_size=5, max_size=30),
)
@settings(max_examples=60)
def test_a_group_is_too_old_only_if_younger_ones_overtook_it(
    batch: int, bound: int, durations: list[float]
) -> None:
    def cycle() -> Iterator[float]:
        while True:
            yield from durations

    rules = AdmissionRules(batch_groups=batch, staleness_bound=bound)
    run = simulate(rules, cycle(), steps=10, step_s=1.0)
    trained_at = {group: step for step, (_, groups) in enumerate(run.steps) for group in groups}
    for group, step in trained_at.items():
        if step - run.start_step[group] > bound:
            assert any(trained_at.get(younger, step) < step for younger in range(group + 1, 2000))


def test_bound_zero_is_synchronous_training() -> None:
    rules = AdmissionRules(batch_groups=4, staleness_bound=0)
    run = simulate(rules, iter([1.0, 5.0, 2.0, 3.0] * 100), steps=6, step_s=2.0)
    assert set(run.staleness) == {0}
    ends = [at_s for at_s, _ in run.steps]
    # Nothing starts while a step is computed: every start is at time 0 or at the end of a step.
    assert set(run.starts) <= {0.0, *ends}
    assert Counter(run.starts) == Counter(dict.fromkeys([0.0, *ends[:-1]], 4))


def test_work_ahead_overlaps_steps_and_keeps_the_trainer_busy() -> None:
    def hours(bound: int) -> float:
        rules = AdmissionRules(batch_groups=4, staleness_bound=bound)
        return simulate(rules, constant(3.0), steps=40, step_s=2.0).steps[-1][0]

    assert hours(0) == pytest.approx(40 * 5.0)
    assert hours(2) < 40 * 2.0 * 1.15


def test_starts_are_spread_over_the_step_instead_of_released_in_a_burst() -> None:
    def largest_burst(headroom: float) -> int:
        rules = AdmissionRules(batch_groups=16, staleness_bound=2, pace_headroom=headroom)
        run = simulate(rules, constant(5.0), steps=30, step_s=8.0)
        late = [at_s for at_s in run.starts if at_s > 80.0]
        return max(sum(0 <= other - at_s < 0.5 for other in late) for at_s in late)

    assert largest_burst(0.0) == 16
    assert largest_burst(2.0) <= 3


def test_pacing_costs_no_throughput_when_most_groups_are_skipped() -> None:
    def end(headroom: float) -> float:
        rules = AdmissionRules(batch_groups=8, staleness_bound=2, pace_headroom=headroom)
        run = simulate(
            rules, constant(4.0), steps=40, step_s=3.0, skips=lambda group: group % 5 < 3
        )
        return run.steps[-1][0]

    assert end(2.0) <= end(0.0) * 1.1


@pytest.mark.parametrize(
    ("pipeline", "reason"),
    [
        (Pipeline(step=3, training=False, in_flight=4, ready=2, steps_left=9), Hold.BOUND),
        (Pipeline(step=3, training=True, in_flight=1, ready=1, steps_left=9), Hold.BOUND),
        (Pipeline(step=9, training=False, in_flight=2, ready=1, steps_left=1), Hold.ENOUGH),
        (Pipeline(step=9, training=True, in_flight=0, ready=0, steps_left=0), Hold.ENOUGH),
    ],
)
def test_says_why_nothing_may_start(pipeline: Pipeline, reason: Hold) -> None:
    rules = AdmissionRules(batch_groups=2, staleness_bound=1 if pipeline.training else 2)
    assert next_start(rules, pipeline, Pace(), 0.0) == Blocked(reason)


def test_limit_on_groups_in_flight_holds_starts_back() -> None:
    rules = AdmissionRules(batch_groups=2, staleness_bound=9, max_in_flight=3)
    full = Pipeline(step=0, training=False, in_flight=3, ready=0, steps_left=50)
    assert next_start(rules, full, Pace(), 0.0) == Blocked(Hold.IN_FLIGHT)


def test_slow_groups_that_steps_have_passed_block_no_start() -> None:
    rules = AdmissionRules(batch_groups=2, staleness_bound=1)
    stuck = Pipeline(step=5, training=False, in_flight=4, ready=0, steps_left=9)
    passed = Pipeline(step=5, training=False, in_flight=4, overdue=3, ready=0, steps_left=9)
    assert next_start(rules, stuck, Pace(), 0.0) == Blocked(Hold.BOUND)
    assert next_start(rules, passed, Pace(), 0.0) == Start(min_step=4)


@pytest.mark.parametrize(
    ("ages_s", "typical_s", "expected"),
    [
        ([40, 10, 10], 10.0, 1),
        ([40, 40, 40, 40], 10.0, 2),
        ([29, 29], 10.0, 0),
        ([1e6, 1e6], 0.0, 0),
    ],
)
def test_groups_far_slower_than_usual_are_not_waited_for_up_to_a_batch_of_them(
    ages_s: list[float], typical_s: float, expected: int
) -> None:
    rules = AdmissionRules(batch_groups=2, staleness_bound=8)
    groups = [Outstanding(started_step=5, placed_s=100.0 - age) for age in ages_s]
    found = count_overdue(rules, groups, step=6, now_s=100.0, typical_s=typical_s)
    assert found == expected


def test_groups_that_steps_have_passed_by_are_not_waited_for_at_all() -> None:
    rules = AdmissionRules(batch_groups=2, staleness_bound=1)
    groups = [Outstanding(started_step=step, placed_s=0.0) for step in (1, 2, 3, 4, 5)]
    assert count_overdue(rules, groups, step=5, now_s=0.0, typical_s=0.0) == 3


def test_the_last_step_need_not_wait_for_the_slowest_group() -> None:
    rules = AdmissionRules(batch_groups=4, staleness_bound=1)
    ending = Pipeline(step=9, training=False, in_flight=1, ready=3, steps_left=1)
    assert next_start(rules, ending, Pace(interval_s=1.0), 99.0) == Start(min_step=9)


def test_weights_may_be_as_old_as_the_step_that_will_train_the_group_allows() -> None:
    rules = AdmissionRules(batch_groups=2, staleness_bound=2)
    early = Pipeline(step=7, training=False, in_flight=0, ready=1, steps_left=50)
    late = Pipeline(step=7, training=True, in_flight=2, ready=0, steps_left=50)
    assert next_start(rules, early, Pace(), 0.0) == Start(min_step=5)
    assert next_start(rules, late, Pace(interval_s=1.0), 99.0) == Start(min_step=7)


@pytest.mark.parametrize(
    "wrong",
    [{"batch_groups": 0}, {"staleness_bound": -1}, {"max_in_flight": -1}, {"pace_headroom": 0.5}],
)
def test_refuses_rules_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        AdmissionRules(**({"batch_groups": 1, "staleness_bound": 1} | wrong))  # type: ignore[arg-type]
