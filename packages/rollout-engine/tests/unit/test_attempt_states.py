"""An attempt ends in exactly one outcome, whatever happens to it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_engine.core.attempt import (
    AttemptEvent,
    AttemptState,
    Cancelled,
    Faulted,
    Graded,
    IllegalTransitionError,
    LimitReached,
    NothingToGrade,
    Phase,
    Started,
    Submitted,
    TurnTaken,
    transition,
)
from rollout_engine.types import Fault, FaultCause, FaultStage, LimitKind, Outcome

FAULT = Fault(FaultStage.COMMAND, FaultCause.SANDBOX, "gone")
EVENTS: Sequence[AttemptEvent] = (
    Started(),
    TurnTaken(),
    Submitted(),
    LimitReached(LimitKind.TURNS),
    Graded(solved=True),
    Graded(solved=False, reason="tests_failed"),
    NothingToGrade(),
    Faulted(FAULT),
    Cancelled(),
)


def after(*events: AttemptEvent) -> AttemptState:
    state = AttemptState()
    for event in events:
        state = transition(state, event)
    return state


@pytest.mark.parametrize(
    ("events", "outcome", "reward", "graded"),
    [
        ([Submitted(), Graded(solved=True)], Outcome.SOLVED, 1.0, True),
        ([Submitted(), Graded(solved=False)], Outcome.UNSOLVED, 0.0, True),
        ([Submitted(), NothingToGrade()], Outcome.UNSOLVED, 0.0, False),
        (
            [LimitReached(LimitKind.TURNS), Graded(solved=True)],
            Outcome.LIMIT_REACHED,
            1.0,
            True,
        ),
        (
            [LimitReached(LimitKind.CONTEXT), NothingToGrade()],
            Outcome.LIMIT_REACHED,
            0.0,
            False,
        ),
        ([Submitted(), Faulted(FAULT)], Outcome.FAULT, 0.0, False),
        ([Faulted(FAULT)], Outcome.FAULT, 0.0, False),
        ([Cancelled()], Outcome.CANCELLED, 0.0, False),
    ],
)
def test_endings(events: list[AttemptEvent], outcome: Outcome, reward: float, graded: bool) -> None:
    ending = after(Started(), TurnTaken(), *events).ending
    assert ending is not None
    assert (ending.outcome, ending.reward, ending.graded) == (outcome, reward, graded)


def test_the_limit_that_was_used_up_is_kept_with_the_ending() -> None:
    ending = after(Started(), LimitReached(LimitKind.COMMAND_TIME), Graded(solved=False)).ending
    assert ending is not None
    assert ending.limit is LimitKind.COMMAND_TIME


def test_a_sandbox_that_never_starts_is_a_fault_of_that_try() -> None:
    ending = after(Faulted(FAULT)).ending
    assert ending is not None
    assert ending.fault == FAULT


@given(st.lists(st.sampled_from(EVENTS), max_size=30))
def test_any_sequence_ends_at_most_once_and_a_fault_is_never_a_grade(
    events: list[AttemptEvent],
) -> None:
    state = AttemptState()
    for event in events:
        try:
            following = transition(state, event)
        except IllegalTransitionError:
            continue
        assert state.phase is not Phase.ENDED
        assert (following.phase is Phase.ENDED) == (following.ending is not None)
        if isinstance(event, Faulted | Cancelled):
            assert following.ending is not None
            assert not following.ending.outcome.valid
            assert not following.ending.graded
            assert following.ending.reward == 0.0
        elif following.ending is not None:
            assert following.ending.outcome.valid
        state = following


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_nothing_happens_to_an_attempt_that_has_ended(event: AttemptEvent) -> None:
    with pytest.raises(IllegalTransitionError):
        transition(after(Cancelled()), event)


@pytest.mark.parametrize("event", [Submitted(), TurnTaken(), Graded(solved=True)])
def test_an_attempt_without_a_sandbox_takes_no_turn_and_gets_no_grade(
    event: AttemptEvent,
) -> None:
    with pytest.raises(IllegalTransitionError, match="LEASED"):
        transition(AttemptState(), event)
