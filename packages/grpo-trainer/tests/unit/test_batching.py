from __future__ import annotations

import numpy as np
import pytest
from grpo_trainer.core.batching import length_buckets, micro_batches, minibatches
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(1, 300), max_size=80), st.integers(1, 1000))
def test_micro_batches_hold_every_sequence_once_within_the_bound(
    lengths: list[int], bound: int
) -> None:
    batches = micro_batches(lengths, max_tokens=bound)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert sum(lengths[index] for index in batch) <= bound or len(batch) == 1


@given(st.lists(st.integers(1, 300), min_size=1, max_size=80), st.integers(300, 1000))
def test_micro_batches_are_even_and_neighbours_in_length(lengths: list[int], bound: int) -> None:
    batches = micro_batches(lengths, max_tokens=bound)
    flat = [lengths[index] for batch in batches for index in batch]
    assert flat == sorted(lengths)
    sums = [sum(lengths[index] for index in batch) for batch in batches]
    # An even split into as many parts is at most one sequence off the mean.
    assert max(sums) <= sum(lengths) / len(batches) + max(lengths) + 1


def test_a_sequence_longer_than_the_bound_is_alone() -> None:
    assert micro_batches([5, 900, 5], max_tokens=100) == [[0, 2], [1]]


def test_micro_batches_need_room() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        micro_batches([1], max_tokens=0)


@given(st.integers(0, 50), st.integers(1, 6), st.integers(0, 9))
def test_minibatches_hold_every_item_once_and_are_even(count: int, parts: int, seed: int) -> None:
    found = minibatches(count, parts, np.random.default_rng(seed))
    assert sorted(index for part in found for index in part) == list(range(count))
    sizes = [len(part) for part in found]
    assert all(sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(1, 99), max_size=70), st.integers(1, 8), st.integers(1, 5))
def test_length_buckets_hold_every_item_once(
    lengths: list[int], batch_size: int, window: int
) -> None:
    found = length_buckets(
        lengths, batch_size=batch_size, window=window, generator=np.random.default_rng(0)
    )
    assert sorted(index for batch in found for index in batch) == list(range(len(lengths)))
    assert all(len(batch) <= batch_size for batch in found)


def test_buckets_save_padding() -> None:
    lengths = np.random.default_rng(1).integers(10, 200, 512).tolist()

    def padded(window: int) -> int:
        batches = length_buckets(
            lengths, batch_size=16, window=window, generator=np.random.default_rng(2)
        )
        return sum(max(lengths[i] for i in batch) * len(batch) for batch in batches)

    assert padded(8) < 0.75 * padded(1)
