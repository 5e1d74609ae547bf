import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from swe_eval.core.statistics import (
    TaskScore,
    compare_paired,
    mean_pass_at_k,
    pass_at_1_interval,
    pass_at_k,
    pass_at_k_interval,
)


def scores(*solved: int, attempts: int = 4) -> list[TaskScore]:
    return [
        TaskScore(task_id=f"t{i:04d}", solved=s, attempts=attempts) for i, s in enumerate(solved)
    ]


@pytest.mark.parametrize(
    ("attempts", "solved", "k", "expected"),
    [
        (4, 1, 1, 0.25),
        (4, 2, 2, 1 - 1 / 6),
        (4, 0, 4, 0.0),
        (4, 1, 4, 1.0),
        (10, 3, 5, 1 - 21 / 252),
        (200, 10, 100, 1 - math.prod((100 - i) / (200 - i) for i in range(10))),
    ],
)
def test_pass_at_k_has_the_published_values(
    attempts: int, solved: int, k: int, expected: float
) -> None:
    assert pass_at_k(attempts=attempts, solved=solved, k=k) == pytest.approx(expected, abs=1e-6)


@given(st.integers(1, 7), st.data())
def test_pass_at_k_equals_the_share_of_draws_that_hold_a_solved_attempt(
    attempts: int, data: st.DataObject
) -> None:
    solved = data.draw(st.integers(0, attempts))
    k = data.draw(st.integers(1, attempts))
    outcomes = [True] * solved + [False] * (attempts - solved)
    draws = list(itertools.combinations(outcomes, k))
    share = sum(any(d) for d in draws) / len(draws)
    assert pass_at_k(attempts=attempts, solved=solved, k=k) == pytest.approx(share)


@pytest.mark.parametrize(("attempts", "solved", "k"), [(4, 1, 0), (4, 1, 5), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_impossible_counts(attempts: int, solved: int, k: int) -> None:
    with pytest.raises(ValueError):
        pass_at_k(attempts=attempts, solved=solved, k=k)


def test_pass_at_1_weighs_every_task_the_same() -> None:
    mixed = [*scores(4), TaskScore(task_id="z", solved=0, attempts=1)]
    assert mean_pass_at_k(mixed, 1) == pytest.approx(0.5)


def test_without_tasks_nothing_is_claimed() -> None:
    assert math.isnan(mean_pass_at_k([], 1))
    assert math.isnan(pass_at_1_interval([]).low)


def test_interval_agrees_with_the_normal_approximation_for_many_tasks() -> None:
    generator = np.random.default_rng(3)
    data = scores(*generator.binomial(4, 0.4, size=400).tolist())
    rates = np.array([s.solved / 4 for s in data])
    error = 1.96 * rates.std(ddof=1) / math.sqrt(len(rates))
    found = pass_at_1_interval(data)
    assert found.low == pytest.approx(rates.mean() - error, abs=0.004)
    assert found.high == pytest.approx(rates.mean() + error, abs=0.004)


def test_interval_widens_when_attempts_at_a_task_agree() -> None:
    clustered = scores(*([4, 0] * 50))
    independent = scores(*([2] * 90 + [4, 0] * 5))
    wide, narrow = pass_at_1_interval(clustered), pass_at_1_interval(independent)
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


def test_interval_is_the_same_for_the_same_seed_and_does_not_depend_on_blocks() -> None:
    data = scores(*([0, 1, 2, 3, 4] * 20))
    assert pass_at_1_interval(data, seed=5) == pass_at_1_interval(data, seed=5)
    assert pass_at_1_interval(data, seed=5) != pass_at_1_interval(data, seed=6)


def test_none_solved_is_not_certainty() -> None:
    found = pass_at_1_interval(scores(*([0] * 100)))
    assert found.low == 0.0
    # Clopper and Pearson for 0 of 100: 1 - 0.025 ** (1 / 100).
    assert found.high == pytest.approx(0.036217, abs=1e-5)


def test_one_task_says_nothing_of_others() -> None:
    found = pass_at_1_interval(scores(2))
    assert (found.low, found.high) == (0.0, 1.0)


def test_the_interval_of_pass_at_k_is_of_the_unbiased_estimates() -> None:
    data = scores(*([0, 1, 2, 4] * 25))
    found = pass_at_k_interval(data, 4)
    assert found.low < mean_pass_at_k(data, 4) < found.high
    assert found.low > pass_at_1_interval(data).high
    with pytest.raises(ValueError, match=r"1\.\.4"):
        pass_at_k_interval(data, 5)


def test_all_solved_is_not_certainty() -> None:
    found = pass_at_1_interval(scores(*([4] * 100)))
    assert found.low == pytest.approx(1 - 0.036217, abs=1e-5)
    assert found.high == 1.0


def test_paired_comparison_finds_a_gain_that_separate_intervals_would_hide() -> None:
    before = scores(*([0, 1, 2, 3] * 25))
    after = scores(*([1, 2, 3, 4] * 25))
    found = compare_paired(before, after)
    assert found.difference == pytest.approx(0.25)
    assert found.interval.low == pytest.approx(0.25)
    assert found.p_value < 0.001


def test_paired_comparison_of_a_run_with_itself_finds_nothing() -> None:
    data = scores(*([0, 1, 2, 3] * 25))
    found = compare_paired(data, data)
    assert found.difference == 0.0
    assert found.p_value == 1.0


def test_p_value_equals_exhaustive_sign_flips() -> None:
    before = scores(0, 0, 0, 0, 0, 0)
    after = scores(4, 3, 2, 1, 1, 1)
    differences = [1.0, 0.75, 0.5, 0.25, 0.25, 0.25]
    means = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product([1, -1], repeat=6)
    ]
    exact = sum(m >= 3.0 - 1e-9 for m in means) / len(means)
    assert compare_paired(before, after).p_value == pytest.approx(exact, rel=1e-12)


def test_runs_without_a_shared_task_can_not_be_compared() -> None:
    with pytest.raises(ValueError, match="share no task"):
        compare_paired(scores(1), [TaskScore(task_id="other", solved=1, attempts=4)])


def test_a_task_scored_twice_is_refused() -> None:
    twice = [*scores(1), *scores(2)]
    with pytest.raises(ValueError, match="twice"):
        compare_paired(twice, scores(1))


@pytest.mark.parametrize(("solved", "attempts"), [(-1, 4), (5, 4), (0, 0)])
def test_a_score_holds_possible_counts(solved: int, attempts: int) -> None:
    with pytest.raises(ValueError, match="solved must lie"):
        TaskScore(task_id="t", solved=solved, attempts=attempts)
