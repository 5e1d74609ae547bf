"""pass@1, unbiased pass@k and their uncertainty.

Attempts at one task are alike, so an interval that treats them as independent is too narrow. Every
interval here resamples whole tasks (a bootstrap clustered by task) and is seeded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DEFAULT_RESAMPLES = 10_000
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
    """Two-sided, by random sign flips of the differences per task."""


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
    values = [pass_at_k(attempts=s.attempts, solved=s.solved, k=k) for s in scores]
    return math.fsum(values) / len(values)


def pass_at_1_interval(
    scores: Sequence[TaskScore],
    *,
    seed: int = 0,
    level: float = 0.95,
    resamples: int = DEFAULT_RESAMPLES,
) -> Interval:
    """Percentile interval of pass@1 from resampling whole tasks.

    When every task was always solved, or never, resampling shows no spread at all. The interval is
    then Clopper and Pearson's with tasks as the trials, so that 0 of 100 is not certainty.
    """
    _check_level(level)
    if not scores:
        return Interval(low=math.nan, high=math.nan)
    rates = _rates(scores)
    bound = 1.0 - ((1.0 - level) / 2.0) ** (1.0 / len(rates))
    if np.all(rates == 0.0):
        return Interval(low=0.0, high=bound)
    if np.all(rates == 1.0):
        return Interval(low=1.0 - bound, high=1.0)
    means = _resampled_means(rates, seed=seed, resamples=resamples)
    return _percentiles(means, level)


def compare_paired(
    before: Sequence[TaskScore],
    after: Sequence[TaskScore],
    *,
    seed: int = 0,
    level: float = 0.95,
    resamples: int = DEFAULT_RESAMPLES,
) -> PairedComparison:
    """Compares two runs on the tasks that both scored.

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
    means = _resampled_means(differences, seed=seed, resamples=resamples)
    return PairedComparison(
        tasks=len(shared),
        difference=observed,
        interval=_percentiles(means, level),
        p_value=_sign_flip_p_value(differences, seed=seed, resamples=resamples),
    )


def _by_task(scores: Sequence[TaskScore]) -> dict[str, float]:
    rates = {s.task_id: s.solved / s.attempts for s in scores}
    if len(rates) != len(scores):
        raise ValueError("a task is scored twice in one run; merge its attempts first")
    return rates


def _rates(scores: Sequence[TaskScore]) -> _Floats:
    return np.array([s.solved / s.attempts for s in scores], dtype=np.float64)


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
    return (as_extreme + 1) / (resamples + 1)


def _percentiles(means: _Floats, level: float) -> Interval:
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return Interval(low=float(low), high=float(high))


def _check_level(level: float) -> None:
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
