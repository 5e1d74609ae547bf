"""Waits grow to a ceiling and are random below it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_engine.core.retry import Backoff

BACKOFF = Backoff(0.5, 2.0, 10.0)


def test_the_longest_wait_doubles_up_to_the_ceiling() -> None:
    assert [BACKOFF.delay_s(n, 1.0) for n in (1, 2, 3, 5, 6, 10_000)] == [0.5, 1, 2, 8, 10, 10]


@given(st.integers(1, 200), st.floats(0, 1, exclude_max=True))
def test_every_wait_lies_between_nothing_and_the_ceiling(failures: int, draw: float) -> None:
    assert 0 <= BACKOFF.delay_s(failures, draw) <= 10.0


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BACKOFF.delay_s(0, 0.5)
    with pytest.raises(ValueError, match="max_s >= initial_s"):
        Backoff(2.0, 2.0, 1.0)
