"""How old tokens are: optimizer steps along the lineage of the weights.

A run's version numbers rise for ever; its lineage does not hold them all. When a trainer resumes
from a checkpoint, the versions published after that checkpoint are a branch that was thrown away:
their numbers are taken, but the weights held now do not descend from them. What such a version
sampled is as far from the weights held now as the way back to the checkpoint and forth again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FORGOTTEN = 2**62
"""The staleness of versions older than the lineage goes back."""


@dataclass(frozen=True, slots=True)
class LineageVersion:
    """A published version that the present weights descend from, or are."""

    number: int
    step: int
    """Optimizer steps that led to it."""


class Lineage:
    """The versions from the first published to the newest, by number.

    Numbers and steps rise together; several numbers may share a step, because a resumed trainer
    publishes the weights of its checkpoint again under a new number.
    """

    def __init__(self, versions: Iterable[LineageVersion] = ()) -> None:
        self._steps: dict[int, int] = {}
        self._newest: LineageVersion | None = None
        for version in versions:
            self.publish(version.number, version.step)

    def publish(self, number: int, step: int) -> None:
        """Append a version.

        Raises:
            ValueError: The number does not rise, or the step falls.
        """
        newest = self._newest
        if newest is not None and (number <= newest.number or step < newest.step):
            raise ValueError(
                f"expected a number above {newest.number} and a step of at least {newest.step}, "
                f"found number {number} at step {step}"
            )
        self._steps[number] = step
        self._newest = LineageVersion(number, step)

    @property
    def newest(self) -> LineageVersion | None:
        """The version published last; None before the first."""
        return self._newest

    @property
    def versions(self) -> tuple[LineageVersion, ...]:
        """All versions, oldest first."""
        return tuple(LineageVersion(number, step) for number, step in self._steps.items())

    def step_of(self, number: int) -> int | None:
        """Return the step of a version; None if it is not on the lineage."""
        return self._steps.get(number)

    def oldest_number_at(self, step: int) -> int:
        """Return the lowest number whose weights are of at least this step.

        If nothing published is that new, the newest number; 0 before the first version.
        """
        for number, known in self._steps.items():
            if known >= step:
                return number
        return 0 if self._newest is None else self._newest.number

    def staleness(self, versions: NDArray[np.int64], *, step: int) -> NDArray[np.int64]:
        """Return how many optimizer steps lie between each token's weights and `step`.

        A version that is not on the lineage branched off at the one before it by number; each
        number after that is a step of the branch, and counts as one more.

        Args:
            versions: int64 [n], version numbers that sampled the tokens.
            step: Optimizer steps of the weights held now.

        Returns:
            int64 [n]; `FORGOTTEN` for versions older than all of the lineage.
        """
        numbers, where = np.unique(versions, return_inverse=True)
        ages = np.array([self._age(int(number), step) for number in numbers], np.int64)
        return ages[where] if len(numbers) else np.zeros(0, np.int64)

    def off(self, versions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of these versions are not on the lineage, bool [n]."""
        return ~np.isin(versions, list(self._steps))

    def _age(self, number: int, step: int) -> int:
        made = self._steps.get(number)
        if made is not None:
            return step - made
        known = list(self._steps)
        before = bisect_left(known, number) - 1
        if before < 0:
            return FORGOTTEN
        fork = known[before]
        return step - self._steps[fork] + number - fork

    def trimmed(self, *, keep_steps: int) -> Lineage:
        """Return the lineage without versions more than `keep_steps` older than the newest.

        What a version that was dropped sampled is too old from then on, so keep more than the
        staleness bound.
        """
        if self._newest is None:
            return Lineage()
        oldest = self._newest.step - keep_steps
        return Lineage(version for version in self.versions if version.step >= oldest)
