"""How long to wait before trying again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with full jitter.

    Attributes:
        initial_s: Longest wait after the first failure, seconds.
        factor: Growth of the longest wait from failure to failure; at least 1.
        max_s: Longest wait of all.
    """

    initial_s: float
    factor: float
    max_s: float

    def __post_init__(self) -> None:
        if not (self.initial_s > 0 and self.factor >= 1 and self.max_s >= self.initial_s):
            raise ValueError(
                f"expected initial_s > 0, factor >= 1 and max_s >= initial_s, got {self}"
            )

    def delay_s(self, failures: int, draw: float) -> float:
        """Give the wait after so many failures.

        Args:
            failures: 1 after the first.
            draw: Uniform in [0, 1).

        """
        if failures < 1:
            raise ValueError(f"failures must be at least 1, got {failures}")
        longest = self.initial_s
        for _ in range(failures - 1):
            longest *= self.factor
            if longest >= self.max_s:
                return self.max_s * draw
        return longest * draw


__all__ = ["Backoff"]
