from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from rollout_engine.engines.cpu.noise import derive_seed, draw, noise_state

SEEDS = st.integers(0, 2**64 - 1)


@given(seed=SEEDS, start=st.integers(0, 1000), count=st.integers(1, 20))
def test_any_place_of_a_seeds_sequence_can_be_entered(seed: int, start: int, count: int) -> None:
    whole = np.array([noise_state(seed, 0)], np.uint64)
    numbers = [float(draw(whole)[0]) for _ in range(start + count)]
    entered = np.array([noise_state(seed, start)], np.uint64)
    assert [float(draw(entered)[0]) for _ in range(count)] == numbers[start:]


@given(seeds=st.lists(SEEDS, min_size=2, max_size=8))
def test_a_row_draws_the_same_alone_and_among_others(seeds: list[int]) -> None:
    together = draw(np.array([noise_state(seed, 3) for seed in seeds], np.uint64))
    alone = [draw(np.array([noise_state(seed, 3)], np.uint64))[0] for seed in seeds]
    assert together.tolist() == alone


def test_numbers_are_uniform_within_seeds_and_across_them() -> None:
    across = draw(np.array([noise_state(seed, 0) for seed in range(20_000)], np.uint64))
    within = np.array([noise_state(7, position) for position in range(20_000)], np.uint64)
    for numbers in (across, draw(within)):
        assert numbers.min() > 0.0
        assert numbers.max() < 1.0
        counts, _ = np.histogram(numbers, bins=20, range=(0.0, 1.0))
        # chi-square with 19 degrees of freedom: 1 in 10,000 exceeds 51
        assert ((counts - 1000) ** 2 / 1000).sum() < 51
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_samples_of_one_request_have_seeds_of_their_own() -> None:
    assert derive_seed(5, 0) == 5
    assert derive_seed(-1, 0) == 2**64 - 1
    assert len({derive_seed(5, index) for index in range(100)}) == 100
    assert derive_seed(5, 1) != derive_seed(6, 1)
