"""Our statistics against scipy's and statsmodels', and how often the intervals hold the truth."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats
from statsmodels.regression.linear_model import OLS
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.proportion import proportion_confint
from swe_eval.core.statistics import (
    Interval,
    TaskScore,
    compare_paired,
    pass_at_1_interval,
    pass_at_k,
    pass_at_k_interval,
)


def scored(solved: npt.NDArray[np.int64], attempts: int = 4) -> list[TaskScore]:
    return [
        TaskScore(task_id=f"t{i:04d}", solved=int(s), attempts=attempts)
        for i, s in enumerate(solved)
    ]


def drawn(seed: int, tasks: int, a: float, b: float, attempts: int = 4) -> list[TaskScore]:
    """Tasks of unlike difficulty, Beta(a, b): attempts at one task are alike."""
    generator = np.random.default_rng(seed)
    return scored(generator.binomial(attempts, generator.beta(a, b, size=tasks)), attempts)


def rates(scores: list[TaskScore]) -> npt.NDArray[np.float64]:
    return np.array([s.solved / s.attempts for s in scores], dtype=np.float64)


@pytest.mark.parametrize(("tasks", "a", "b"), [(100, 0.12, 1.5), (60, 0.5, 1.0), (30, 2.0, 1.0)])
def test_intervals_are_those_of_scipys_bca_bootstrap(tasks: int, a: float, b: float) -> None:
    data = drawn(1, tasks, a, b)
    reference = stats.bootstrap(
        (rates(data),), np.mean, method="BCa", n_resamples=20_000, rng=np.random.default_rng(2)
    ).confidence_interval
    found = pass_at_1_interval(data, resamples=20_000)
    noise = 0.025 * (reference.high - reference.low)
    assert found.low == pytest.approx(reference.low, abs=noise)
    assert found.high == pytest.approx(reference.high, abs=noise)


def test_the_width_is_that_of_statsmodels_cluster_robust_error() -> None:
    data = drawn(3, 400, 0.8, 1.2)
    solved = np.concatenate([[1] * s.solved + [0] * (4 - s.solved) for s in data])
    clusters = np.repeat(np.arange(len(data)), 4)
    fit = OLS(solved, np.ones((len(solved), 1))).fit(
        cov_type="cluster", cov_kwds={"groups": clusters}
    )
    found = pass_at_1_interval(data)
    assert (found.high - found.low) / (2 * 1.96) == pytest.approx(float(fit.bse[0]), rel=0.05)
    # Independent attempts would claim to know more than there is to know.
    naive = float(np.sqrt(solved.mean() * (1 - solved.mean()) / len(solved)))
    assert float(fit.bse[0]) > 1.3 * naive


@pytest.mark.parametrize("tasks", [3, 20, 100])
def test_none_and_all_solved_have_clopper_and_pearsons_bound(tasks: int) -> None:
    none = pass_at_1_interval(scored(np.zeros(tasks, np.int64)))
    every = pass_at_1_interval(scored(np.full(tasks, 4)))
    assert none.high == pytest.approx(proportion_confint(0, tasks, method="beta")[1])
    assert every.low == pytest.approx(proportion_confint(tasks, tasks, method="beta")[0])


@pytest.mark.parametrize(("attempts", "solved", "k"), [(4, 1, 2), (10, 3, 5), (100, 2, 64)])
def test_pass_at_k_is_the_hypergeometric_chance(attempts: int, solved: int, k: int) -> None:
    reference = 1 - stats.hypergeom(attempts, solved, k).pmf(0)
    assert pass_at_k(attempts=attempts, solved=solved, k=k) == pytest.approx(reference)


@pytest.mark.parametrize("seed", range(4))
def test_the_p_value_is_scipys_exact_permutation_test(seed: int) -> None:
    before, after = drawn(seed, 9, 0.5, 1.0), drawn(seed + 50, 9, 0.8, 1.0)
    reference = stats.permutation_test(
        (rates(after) - rates(before),),
        lambda x, axis: np.mean(x, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=math.inf,
    )
    found = compare_paired(before, after)
    assert found.difference == pytest.approx(float(reference.statistic))
    assert found.p_value == pytest.approx(float(reference.pvalue), rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_with_one_attempt_a_task_the_p_value_is_mcnemars(seed: int) -> None:
    before, after = drawn(seed, 80, 0.5, 1.0, 1), drawn(seed + 50, 80, 1.0, 1.0, 1)
    table = np.zeros((2, 2))
    for one, other in zip(before, after, strict=True):
        table[one.solved, other.solved] += 1
    reference = float(mcnemar(table, exact=True).pvalue)
    assert compare_paired(before, after).p_value == pytest.approx(reference, rel=1e-9)


def test_a_sampled_p_value_is_the_exact_one_within_its_noise() -> None:
    # Numbers of attempts without a common divisor have too many sums for the exact one.
    generator = np.random.default_rng(4)
    before: list[TaskScore] = []
    after: list[TaskScore] = []
    for i, attempts in enumerate([101, 103, 107, 109, 113, 127, 131, 137] * 5):
        for run, chance in ((before, 0.3), (after, 0.33)):
            solved = int(generator.binomial(attempts, chance))
            run.append(TaskScore(task_id=f"t{i}", solved=solved, attempts=attempts))
    reference = stats.permutation_test(
        (rates(after) - rates(before),),
        lambda x, axis: np.mean(x, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=20_000,
        rng=np.random.default_rng(5),
    )
    found = compare_paired(before, after, resamples=20_000)
    assert found.p_value == pytest.approx(float(reference.pvalue), abs=0.015)


@dataclass(frozen=True)
class World:
    """Where tasks come from: solved by chance p ~ Beta(a, b), another p for each task."""

    name: str
    tasks: int
    a: float
    b: float
    attempts: int = 4

    @property
    def pass_at_1(self) -> float:
        return self.a / (self.a + self.b)

    @property
    def pass_at_n(self) -> float:
        """E[1 - (1 - p)^n] for p ~ Beta(a, b)."""
        unsolved = math.lgamma(self.b + self.attempts) + math.lgamma(self.a + self.b)
        unsolved -= math.lgamma(self.b) + math.lgamma(self.a + self.b + self.attempts)
        return 1 - math.exp(unsolved)

    def draw(self, generator: np.random.Generator) -> list[TaskScore]:
        chances = generator.beta(self.a, self.b, size=self.tasks)
        return scored(generator.binomial(self.attempts, chances), self.attempts)


SHORT = World("100 tasks, a third solved", 100, 0.5, 1.0)
WORLDS = (
    SHORT,
    World("100 tasks, 7 % solved", 100, 0.12, 1.5),
    World("100 tasks, 13 % solved", 100, 0.2, 1.36),
    World("100 tasks, 27 % solved, attempts nearly all alike", 100, 0.1, 0.27),
    World("30 tasks, half solved", 30, 1.0, 1.0),
    World("500 tasks, 7 % solved", 500, 0.12, 1.5),
    World("100 tasks, one attempt", 100, 0.3, 0.8, 1),
)


def coverage(
    rounds: int, truth: float, interval: Callable[[int, np.random.Generator], Interval]
) -> float:
    generator = np.random.default_rng(11)
    found = [interval(i, generator) for i in range(rounds)]
    return sum(f.low <= truth <= f.high for f in found) / rounds


def of_pass_at_1(world: World, rounds: int, resamples: int) -> float:
    return coverage(
        rounds,
        world.pass_at_1,
        lambda i, g: pass_at_1_interval(world.draw(g), seed=i, resamples=resamples),
    )


def test_intervals_cover_the_truth_about_95_percent_of_the_time() -> None:
    assert 0.93 <= of_pass_at_1(SHORT, 600, 800) <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS, ids=lambda w: w.name)
def test_intervals_cover_the_truth_in_every_world(world: World) -> None:
    rounds = 4000
    one = of_pass_at_1(world, rounds, 1000)
    many = coverage(
        rounds,
        world.pass_at_n,
        lambda i, g: pass_at_k_interval(world.draw(g), world.attempts, seed=i, resamples=1000),
    )
    shift = coverage(
        rounds,
        0.0,
        lambda i, g: compare_paired(world.draw(g), world.draw(g), seed=i, resamples=1000).interval,
    )
    print(f"\n| {world.name} | {one:.3f} | {many:.3f} | {shift:.3f} |")
    assert 0.93 <= one <= 0.97
    assert 0.93 <= many <= 0.97
    assert 0.93 <= shift <= 0.97
