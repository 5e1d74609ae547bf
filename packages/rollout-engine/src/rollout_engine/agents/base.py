"""What an agent loop needs to know of an agent: how it is addressed and how it acts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollout_engine.agents.template import Message


@dataclass(frozen=True, slots=True)
class RunCommand:
    """The policy wants a shell command run."""

    command: str


@dataclass(frozen=True, slots=True)
class Submit:
    """The policy says it is done."""


@dataclass(frozen=True, slots=True)
class Unusable:
    """The message holds no action; `explanation` tells the policy what is wrong with it."""

    explanation: str


Action = RunCommand | Submit | Unusable


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """What came of a command, for the policy to read.

    Attributes:
        output: Standard output and error as text, already cut to the configured size.
        timeout_s: What it was allowed to run.
        remaining: What is left of the policy's limits, in words; empty if it is not told.
    """

    output: str
    exit_code: int
    timed_out: bool = False
    out_of_memory: bool = False
    timeout_s: float = 0.0
    remaining: str = ""


class Agent(Protocol):
    """Turns a task into a conversation. Pure: no I/O, no clock."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas for the chat template; empty if the agent needs none."""
        ...

    @property
    def max_output_bytes(self) -> int:
        """How much of a command's output is kept."""
        ...

    @property
    def tells_remaining(self) -> bool:
        """Whether observations say what is left of the limits."""
        ...

    def opening(self, instruction: str) -> list[Message]:
        """Give the messages before the policy's first turn."""
        ...

    def action(self, text: str) -> Action:
        """Read the policy's message."""
        ...

    def observation(self, outcome: CommandOutcome) -> Message:
        """Say what came of a command."""
        ...

    def correction(self, unusable: Unusable, remaining: str) -> Message:
        """Say that the message held no action."""
        ...


__all__ = ["Action", "Agent", "CommandOutcome", "RunCommand", "Submit", "Unusable"]
