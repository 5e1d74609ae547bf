"""pass@1, unbiased pass@k and their uncertainty.

Attempts at one task are alike, so an interval that treats them as independent is too narrow. Every
interval here resamples whole tasks (a bootstrap clustered by task) and is seeded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

DEFAULT_RESAMPLES = 10_000
_MAX_DENOMINATOR = 1_000_000
_MAX_CONVOLUTION = 200_000_000
_NORMAL = NormalDist()
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskScore:
    """How often a task was solved among its valid attempts."""

    task_id: str
    solved: int
    attempts: int

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0 <= self.solved <= self.attempts:
            raise ValueError(
                f"task {self.task_id}: solved must lie in 0..attempts and attempts be at least 1, "
                f"got {self.solved} of {self.attempts}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A confidence interval, both ends included."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedComparison:
    """Run B against run A on the tasks both scored: difference of pass@1, B minus A."""

    tasks: int
    difference: float
    interval: Interval
    p_value: float
    """Two-sided, by sign flips of the differences per task."""


def pass_at_k(*, attempts: int, solved: int, k: int) -> float:
    """Chance that k attempts drawn without replacement from these contain a solved one.

    This is the unbiased estimate ``1 - C(n - c, k) / C(n, k)``.

    Raises:
        ValueError: k is not in 1..attempts, or solved not in 0..attempts.
    """
    if not 1 <= k <= attempts:
        raise ValueError(f"k must lie in 1..{attempts} (the number of attempts), got {k}")
    if not 0 <= solved <= attempts:
        raise ValueError(f"solved must lie in 0..{attempts}, got {solved}")
    return 1.0 - math.comb(attempts - solved, k) / math.comb(attempts, k)


def mean_pass_at_k(scores: Sequence[TaskScore], k: int) -> float:
    """Mean over tasks of the unbiased pass@k; every task weighs the same. nan without tasks."""
    if not scores:
        return math.nan
    return math.fsum(_pass_at_k(scores, k)) / len(scores)


def pass_at_k_interval(
    scores: Sequence[TaskScore],
    k: int,
    *,
    seed: int = 0,
    level: float = 0.95,
    resamples: int = DEFAULT_RESAMPLES,
) -> Interval:
    """Interval of the mean unbiased pass@k, from resampling whole tasks (BCa).

    When every task has 0, or every task 1, resampling shows no spread at all. The interval is then
    Clopper and Pearson's with tasks as the trials, so that 0 of 100 is not certainty. A single task
    says nothing of others: 0 to 1.

    Raises:
        ValueError: k is not in 1..attempts of every task, or level not between 0 and 1.
    """
    _check_level(level)
    if not scores:
        return Interval(low=math.nan, high=math.nan)
    values = _pass_at_k(scores, k)
    bound = 1.0 - ((1.0 - level) / 2.0) ** (1.0 / len(values))
    if np.all(values == 0.0):
        return Interval(low=0.0, high=bound)
    if np.all(values == 1.0):
        return Interval(low=1.0 - bound, high=1.0)
    if len(values) == 1:
        return Interval(low=0.0, high=1.0)
    return _bca(values, seed=seed, level=level, resamples=resamples)


def pass_at_1_interval(
    scores: Sequence[TaskScore],
    *,
    seed: int = 0,
    level: float = 0.95,
    resamples: int = DEFAULT_RESAMPLES,
) -> Interval:
    """`pass_at_k_interval` of k = 1."""
    return pass_at_k_interval(scores, 1, seed=seed, level=level, resamples=resamples)


def compare_paired(
    before: Sequence[TaskScore],
    after: Sequence[TaskScore],
    *,
    seed: int = 0,
    level: float = 0.95,
    resamples: int = DEFAULT_RESAMPLES,
) -> PairedComparison:
    """Compares two runs on the tasks that both scored: pass@1, each task its own control.

    Under the null hypothesis a task's difference is as likely to have the other sign, so the
    p-value is the share of all sign patterns whose mean is at least as far from 0 (Fisher's
    randomisation test for pairs; with one attempt a task it is McNemar's exact test). Whole tasks
    are flipped, so attempts need not be independent.

    Raises:
        ValueError: the runs share no task, or a run names a task twice.
    """
    _check_level(level)
    first, second = _by_task(before), _by_task(after)
    shared = sorted(first.keys() & second.keys())
    if not shared:
        raise ValueError(
            f"the runs share no task: {len(first)} tasks before, {len(second)} after; "
            "compare evaluations of the same list"
        )
    differences = np.array([second[t] - first[t] for t in shared], dtype=np.float64)
    observed = float(differences.mean())
    return PairedComparison(
        tasks=len(shared),
        difference=observed,
        interval=_bca(differences, seed=seed, level=level, resamples=resamples),
        p_value=_sign_flip_p_value(differences, seed=seed, resamples=resamples),
    )


def _by_task(scores: Sequence[TaskScore]) -> dict[str, float]:
    rates = {s.task_id: s.solved / s.attempts for s in scores}
    if len(rates) != len(scores):
        raise ValueError("a task is scored twice in one run; merge its attempts first")
    return rates


def _pass_at_k(scores: Sequence[TaskScore], k: int) -> _Floats:
    values = [pass_at_k(attempts=s.attempts, solved=s.solved, k=k) for s in scores]
    return np.array(values, dtype=np.float64)


def _resampled_means(values: _Floats, *, seed: int, resamples: int) -> _Floats:
    generator = np.random.default_rng(seed)
    means = np.empty(resamples, dtype=np.float64)
    # In blocks, so that memory stays bounded for thousands of tasks.
    block = max(1, 2_000_000 // len(values))
    for start in range(0, resamples, block):
        count = min(block, resamples - start)
        picks = generator.integers(0, len(values), size=(count, len(values)))
        means[start : start + count] = values[picks].mean(axis=1)
    return means


def _sign_flip_p_value(differences: _Floats, *, seed: int, resamples: int) -> float:
    exact = _exact_sign_flips(differences)
    if exact is not None:
        return exact
    generator = np.random.default_rng([seed, 1])
    observed = abs(float(differences.mean()))
    as_extreme = 0
    block = max(1, 2_000_000 // len(differences))
    for start in range(0, resamples, block):
        count = min(block, resamples - start)
        signs = generator.integers(0, 2, size=(count, len(differences))) * 2 - 1
        flipped = np.abs((signs * differences).mean(axis=1))
        # Rounding must not make the observed arrangement look less extreme than itself.
        as_extreme += int(np.count_nonzero(flipped >= observed - 1e-12))
    # The observed arrangement counts as one of them: a sampled p-value of 0 would be a lie
    # (Phipson and Smyth 2010).
    return (as_extreme + 1) / (resamples + 1)


def _exact_sign_flips(differences: _Floats) -> float | None:
    """The p-value over all sign patterns; None if that takes too long.

    Differences are fractions of the numbers of attempts, so their sum has few possible values and
    its distribution is a convolution, task by task.
    """
    fractions = [Fraction(d).limit_denominator(_MAX_DENOMINATOR) for d in differences.tolist()]
    unit = math.lcm(*(f.denominator for f in fractions))
    steps = [abs(int(f * unit)) for f in fractions if f]
    reach = sum(steps)
    if (2 * reach + 1) * max(1, len(steps)) > _MAX_CONVOLUTION:
        return None
    chances = np.zeros(2 * reach + 1, dtype=np.float64)
    chances[reach] = 1.0
    for step in steps:
        chances = (np.roll(chances, step) + np.roll(chances, -step)) / 2.0
    observed = abs(int(sum(fractions) * unit))
    sums = np.abs(np.arange(-reach, reach + 1))
    return min(1.0, math.fsum(chances[sums >= observed]))


def _bca(values: _Floats, *, seed: int, level: float, resamples: int) -> Interval:
    """Bias-corrected and accelerated bootstrap interval of the mean (Efron 1987).

    Pass rates of hard sets are skewed: there the plain percentile interval covers too little (see
    docs/results.md).
    """
    observed = float(values.mean())
    centred = values - observed
    squares = float(np.square(centred).sum())
    if squares == 0.0:
        return Interval(low=observed, high=observed)
    means = _resampled_means(values, seed=seed, resamples=resamples)
    # Ties count half: means of few different rates repeat. The bounds keep the quantile finite.
    below = float(((means < observed).mean() + (means <= observed).mean()) / 2.0)
    bias = _NORMAL.inv_cdf(min(max(below, 1.0 / resamples), 1.0 - 1.0 / resamples))
    # The jackknife's skewness; of a mean it is that of the values.
    acceleration = float(np.power(centred, 3).sum()) / (6.0 * squares**1.5)

    def adjusted(share: float) -> float:
        z = bias + _NORMAL.inv_cdf(share)
        return _NORMAL.cdf(bias + z / (1.0 - acceleration * z))

    tail = (1.0 - level) / 2.0
    low, high = np.quantile(means, [adjusted(tail), adjusted(1.0 - tail)])
    return Interval(low=float(low), high=float(high))


def _check_level(level: float) -> None:
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
