"""Going round in circles is noticed; trying different things is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rollout_engine.core.progress import ProgressState


def after(*actions: str, repeated: int = 3) -> ProgressState:
    state = ProgressState()
    for action in actions:
        state = state.acted(action, repeated)
    return state


def test_the_same_action_as_often_as_allowed_is_stuck() -> None:
    assert not after("ls", "ls").stuck(3, 0)
    assert after("ls", "ls", "ls").stuck(3, 0)


def test_a_cycle_of_different_actions_is_stuck() -> None:
    assert after(*["edit", "test"] * 3).stuck(3, 0)
    assert after(*["a", "b", "c"] * 3).stuck(3, 0)


def test_testing_after_each_new_edit_is_progress() -> None:
    actions = [a for i in range(10) for a in (f"edit {i}", "test")]
    assert not after(*actions).stuck(3, 0)


def test_another_action_breaks_the_repetition() -> None:
    assert not after("ls", "ls", "cat", "ls").stuck(3, 0)


def test_turns_without_an_action_count_only_in_a_row() -> None:
    state = ProgressState().failed_to_act().failed_to_act()
    assert state.stuck(0, 2)
    assert not state.stuck(0, 3)
    assert not state.acted("ls", 3).stuck(0, 1)


def test_zero_switches_both_checks_off() -> None:
    assert not after(*["ls"] * 50, repeated=0).stuck(0, 0)
    state = ProgressState()
    for _ in range(50):
        state = state.failed_to_act()
    assert not state.stuck(0, 0)


@given(st.lists(st.sampled_from("abcd"), max_size=60), st.integers(1, 5))
def test_no_more_history_is_kept_than_the_limit_needs(actions: list[str], repeated: int) -> None:
    assert len(after(*actions, repeated=repeated).actions) <= 3 * repeated


@given(st.lists(st.sampled_from("abcd"), max_size=40), st.integers(2, 5))
def test_stuck_agrees_with_looking_at_the_whole_history(actions: list[str], times: int) -> None:
    def cycles(length: int) -> bool:
        tail = actions[-length * times :]
        return len(tail) == length * times and all(
            tail[i] == tail[i % length] for i in range(len(tail))
        )

    expected = any(cycles(length) for length in (1, 2, 3))
    assert after(*actions, repeated=times).stuck(times, 0) == expected
