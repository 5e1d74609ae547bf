"""Limits bound what is asked for, and say which of them was used up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_engine.core.limits import (
    CommandBudget,
    TurnBudget,
    Usage,
    next_command,
    next_turn,
    remaining_text,
    with_defaults,
)
from rollout_engine.types import AttemptLimits, LimitKind

LIMITS = AttemptLimits(
    turns=3,
    turn_tokens=10,
    total_tokens=25,
    context_tokens=100,
    command_time_s=20.0,
    repeated_actions=4,
)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (Usage(), TurnBudget(10, LimitKind.TURN_TOKENS)),
        (Usage(turns=3), LimitKind.TURNS),
        (Usage(turns=1, sampled_tokens=20), TurnBudget(5, LimitKind.TOTAL_TOKENS)),
        (Usage(turns=1, sampled_tokens=25), LimitKind.TOTAL_TOKENS),
        (Usage(context_tokens=97), TurnBudget(3, LimitKind.CONTEXT)),
        (Usage(context_tokens=120), LimitKind.CONTEXT),
    ],
)
def test_the_next_turn_gets_what_the_tightest_limit_leaves(
    usage: Usage, expected: TurnBudget | LimitKind
) -> None:
    assert next_turn(LIMITS, usage) == expected


@pytest.mark.parametrize(
    ("used_s", "expected"),
    [
        (0.0, CommandBudget(8.0, exhausts=False)),
        (15.0, CommandBudget(5.0, exhausts=True)),
        (20.0, LimitKind.COMMAND_TIME),
        (31.0, LimitKind.COMMAND_TIME),
    ],
)
def test_a_command_may_run_for_what_is_left_of_the_policys_own_time(
    used_s: float, expected: CommandBudget | LimitKind
) -> None:
    assert next_command(LIMITS, Usage(command_time_s=used_s), 8.0) == expected


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), max_size=40))
def test_no_sequence_of_turns_exceeds_any_limit(turns: list[tuple[int, int]]) -> None:
    usage = Usage(context_tokens=7)
    for wanted, observed in turns:
        budget = next_turn(LIMITS, usage)
        if isinstance(budget, LimitKind):
            break
        sampled = min(wanted, budget.max_new_tokens)
        assert 1 <= sampled <= LIMITS.turn_tokens
        usage = usage.after_turn(sampled)
        assert usage.context_tokens <= LIMITS.context_tokens
        usage = usage.with_context(usage.context_tokens + observed)
    assert usage.turns <= LIMITS.turns
    assert usage.sampled_tokens <= LIMITS.total_tokens


def test_unset_limits_come_from_the_engines_defaults() -> None:
    assert with_defaults(AttemptLimits(), LIMITS) == LIMITS
    assert with_defaults(AttemptLimits(turns=9), LIMITS).turns == 9
    assert with_defaults(AttemptLimits(command_time_s=1.5), LIMITS).command_time_s == 1.5


def test_the_context_never_exceeds_what_the_model_takes() -> None:
    assert with_defaults(AttemptLimits(), LIMITS, 64).context_tokens == 64
    assert with_defaults(AttemptLimits(context_tokens=500), LIMITS, 64).context_tokens == 64
    assert with_defaults(AttemptLimits(context_tokens=20), LIMITS, 64).context_tokens == 20


def test_the_policy_can_be_told_what_it_has_left() -> None:
    usage = Usage(turns=2, sampled_tokens=20, context_tokens=40, command_time_s=12.6)
    assert remaining_text(LIMITS, usage) == "1 turn, 5 tokens and 7 s of command time left"
    assert remaining_text(LIMITS, Usage(turns=9, sampled_tokens=99)).startswith("0 turns, 0 tok")


def test_a_clock_that_steps_back_never_gives_time_back() -> None:
    assert Usage(command_time_s=3.0).after_command(-1.0).command_time_s == 3.0
