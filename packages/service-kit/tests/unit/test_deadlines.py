from __future__ import annotations

import pytest
from service_kit import Deadline, DeadlineExceeded


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_deadline_runs_down_and_never_below_zero() -> None:
    clock = Clock()
    deadline = Deadline.after(10, clock=clock)
    assert deadline.remaining_s() == 10
    clock.now_s += 4
    assert deadline.remaining_s() == 6
    assert deadline.within(2) == 2
    assert deadline.within(60) == 6
    clock.now_s += 60
    assert deadline.remaining_s() == 0
    assert deadline.within(2) == 0


def test_work_without_time_left_is_refused_before_it_begins() -> None:
    clock = Clock()
    deadline = Deadline.after(1, clock=clock)
    deadline.check("grading")
    clock.now_s += 1
    with pytest.raises(DeadlineExceeded, match="no time left for grading"):
        deadline.check("grading")
