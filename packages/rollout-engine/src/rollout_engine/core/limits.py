"""What a policy may use up, what it has used, and what that allows next.

The policy's clock counts the run time of its own commands and nothing else: waiting for engines or
sandboxes, prefill and pauses for weight updates are not its doing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollout_engine.types import AttemptLimits, LimitKind


@dataclass(frozen=True, slots=True)
class Usage:
    """What an attempt has used.

    Attributes:
        turns: Generations begun.
        sampled_tokens: Over all turns.
        context_tokens: Length of the context as it stands.
        command_time_s: Summed run time of its commands.
    """

    turns: int = 0
    sampled_tokens: int = 0
    context_tokens: int = 0
    command_time_s: float = 0.0

    def after_turn(self, sampled_tokens: int) -> Usage:
        """Give the usage after a generation."""
        return replace(
            self,
            turns=self.turns + 1,
            sampled_tokens=self.sampled_tokens + sampled_tokens,
            context_tokens=self.context_tokens + sampled_tokens,
        )

    def with_context(self, context_tokens: int) -> Usage:
        """Give the usage with the context at another length."""
        return replace(self, context_tokens=context_tokens)

    def after_command(self, run_time_s: float) -> Usage:
        """Give the usage after a command."""
        return replace(self, command_time_s=self.command_time_s + max(0.0, run_time_s))


def with_defaults(
    limits: AttemptLimits, defaults: AttemptLimits, model_context_tokens: int = 0
) -> AttemptLimits:
    """Fill every limit that is 0 from the defaults, and keep the context within the model's.

    Args:
        limits: Of an assignment.
        defaults: Of the engine.
        model_context_tokens: Longest context that the model takes; 0: unknown.

    """
    context_tokens = limits.context_tokens or defaults.context_tokens
    if model_context_tokens:
        # Else an engine refuses the request, and the policy's own doing looks like a fault.
        context_tokens = min(context_tokens, model_context_tokens)
    return AttemptLimits(
        turns=limits.turns or defaults.turns,
        turn_tokens=limits.turn_tokens or defaults.turn_tokens,
        total_tokens=limits.total_tokens or defaults.total_tokens,
        context_tokens=context_tokens,
        command_time_s=limits.command_time_s or defaults.command_time_s,
        repeated_actions=limits.repeated_actions or defaults.repeated_actions,
    )


@dataclass(frozen=True, slots=True)
class TurnBudget:
    """What the next turn may sample, and which limit that bound is.

    Attributes:
        max_new_tokens: At least 1.
        binding: The limit that is reached when all of them are used.
    """

    max_new_tokens: int
    binding: LimitKind


def next_turn(limits: AttemptLimits, usage: Usage) -> TurnBudget | LimitKind:
    """Give the budget of the next turn, or the limit that forbids it."""
    if usage.turns >= limits.turns:
        return LimitKind.TURNS
    room = (
        (limits.turn_tokens, LimitKind.TURN_TOKENS),
        (limits.total_tokens - usage.sampled_tokens, LimitKind.TOTAL_TOKENS),
        (limits.context_tokens - usage.context_tokens, LimitKind.CONTEXT),
    )
    tokens, binding = min(room, key=lambda pair: pair[0])
    if tokens < 1:
        return binding
    return TurnBudget(tokens, binding)


@dataclass(frozen=True, slots=True)
class CommandBudget:
    """How long the next command may run, and whether the policy's own limit is what bounds it.

    Attributes:
        timeout_s: Above 0.
        exhausts: Whether a command that takes all of it has used up COMMAND_TIME.
    """

    timeout_s: float
    exhausts: bool


def next_command(
    limits: AttemptLimits, usage: Usage, single_timeout_s: float
) -> CommandBudget | LimitKind:
    """Give the time of the next command, or COMMAND_TIME if there is none left.

    Args:
        limits: Of the attempt.
        usage: So far.
        single_timeout_s: Longest that any one command may run.

    """
    left_s = limits.command_time_s - usage.command_time_s
    if left_s <= 0:
        return LimitKind.COMMAND_TIME
    return CommandBudget(min(left_s, single_timeout_s), exhausts=left_s <= single_timeout_s)


def remaining_text(limits: AttemptLimits, usage: Usage) -> str:
    """Tell the policy in words what it has left."""
    turns = max(0, limits.turns - usage.turns)
    tokens = max(
        0,
        min(
            limits.total_tokens - usage.sampled_tokens,
            limits.context_tokens - usage.context_tokens,
        ),
    )
    seconds = max(0.0, limits.command_time_s - usage.command_time_s)
    return (
        f"{turns} {'turn' if turns == 1 else 'turns'}, {tokens} tokens and {seconds:.0f} s of "
        "command time left"
    )


__all__ = [
    "CommandBudget",
    "TurnBudget",
    "Usage",
    "next_command",
    "next_turn",
    "remaining_text",
    "with_defaults",
]
