"""Noticing that a policy goes round in circles or says nothing that can be run."""

from __future__ import annotations

from dataclasses import dataclass, replace

LONGEST_CYCLE = 3
"""Cycles of up to so many different actions are noticed."""


@dataclass(frozen=True, slots=True)
class ProgressState:
    """The recent actions of one attempt.

    Attributes:
        actions: The latest ones, oldest first; no more than the limit needs.
        unusable: Turns without a usable action, in a row.
    """

    actions: tuple[str, ...] = ()
    unusable: int = 0

    def acted(self, action: str, repeated_actions: int) -> ProgressState:
        """Give the state after an action."""
        kept = (*self.actions, action)[-LONGEST_CYCLE * repeated_actions :]
        return ProgressState(kept if repeated_actions > 0 else ())

    def failed_to_act(self) -> ProgressState:
        """Give the state after a turn in which no action could be found."""
        return replace(self, unusable=self.unusable + 1)

    def stuck(self, repeated_actions: int, unusable_turns: int) -> bool:
        """Whether the attempt makes no progress.

        Args:
            repeated_actions: The same cycle of actions so many times in a row; 0: never.
            unusable_turns: Turns without a usable action so many times in a row; 0: never.

        """
        if 0 < unusable_turns <= self.unusable:
            return True
        return repeated_actions > 0 and any(
            self._cycles(length, repeated_actions) for length in range(1, LONGEST_CYCLE + 1)
        )

    def _cycles(self, length: int, times: int) -> bool:
        span = length * times
        if times < 2 and length > 1:
            return False
        tail = self.actions[-span:]
        return len(tail) == span and tail == tail[:length] * times


__all__ = ["LONGEST_CYCLE", "ProgressState"]
