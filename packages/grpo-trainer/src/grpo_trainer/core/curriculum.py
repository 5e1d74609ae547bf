"""The order of tasks: seeded passes over a task set, without those that are set aside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """What a task has shown so far: a moving view of its last groups."""

    groups: int = 0
    solved_rate: float = 0.0
    """Share of solved attempts in the last group."""
    same: int = 0
    """How many groups in a row were solved by all attempts, or by none."""


class Curriculum:
    """Draws one task after another.

    Each pass is a permutation that depends on the seed and the pass alone. Quarantined tasks are
    left out. With `avoid_after` a task whose last so many groups were all solved, or all unsolved,
    is left out of `avoid_passes` passes: it has nothing to teach for the time being.

    Args:
        tasks: Task ids; their order is the one the seed permutes.
        seed: Of the order.
        avoid_after: Uniform groups in a row after which a task is passed over; 0: never.
        avoid_passes: How many of the following passes leave it out.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        *,
        seed: int,
        avoid_after: int = 0,
        avoid_passes: int = 1,
    ) -> None:
        if not tasks:
            raise ValueError("a curriculum needs at least one task")
        self._tasks = tuple(tasks)
        self._seed = seed
        self._avoid_after = avoid_after
        self._avoid_passes = avoid_passes
        self._pass = 0
        self._position = 0
        self._order = self._permutation()
        self._quarantined: set[str] = set()
        self._records: dict[str, TaskRecord] = {}
        self._back_in_pass: dict[str, int] = {}

    @property
    def passes(self) -> int:
        """Passes over the task set that were completed."""
        return self._pass

    @property
    def quarantined(self) -> frozenset[str]:
        """Tasks that are drawn no more."""
        return frozenset(self._quarantined)

    def draw(self) -> str:
        """Return the next task.

        Raises:
            LookupError: Every task is quarantined.
        """
        if self._quarantined.issuperset(self._tasks):
            raise LookupError(
                f"all {len(self._tasks)} tasks are quarantined: their attempts keep faulting. Look "
                "at the rollout engine's status for the causes"
            )
        passed_over = 0
        while True:
            task = self._advance()
            if task in self._quarantined:
                continue
            # Avoiding every task would leave nothing to do.
            if self._back_in_pass.get(task, -1) >= self._pass and passed_over < len(self._tasks):
                passed_over += 1
                continue
            return task

    def record(self, task: str, *, solved: int, attempts: int) -> None:
        """Note a finished group of a task."""
        if not attempts:
            return
        before = self._records.get(task, TaskRecord())
        uniform = solved in (0, attempts)
        same = before.same + 1 if uniform else 0
        self._records[task] = TaskRecord(before.groups + 1, solved / attempts, same)
        if self._avoid_after and same >= self._avoid_after:
            self._back_in_pass[task] = self._pass + self._avoid_passes

    def quarantine(self, task: str) -> None:
        """Leave a task out from now on: its attempts keep faulting."""
        self._quarantined.add(task)

    def snapshot(self) -> dict[str, Any]:
        """Return the state as JSON values; the tasks themselves are not in it."""
        return {
            "seed": self._seed,
            "tasks": len(self._tasks),
            "pass": self._pass,
            "position": self._position,
            "quarantined": sorted(self._quarantined),
            "records": {
                task: [record.groups, record.solved_rate, record.same]
                for task, record in self._records.items()
            },
            "back_in_pass": dict(self._back_in_pass),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Go on where `snapshot` was taken.

        Raises:
            ValueError: The snapshot is of another seed or of a task set of another size.
        """
        expected = (self._seed, len(self._tasks))
        found = (snapshot["seed"], snapshot["tasks"])
        if expected != found:
            raise ValueError(
                f"the curriculum was saved with seed {found[0]} over {found[1]} tasks; expected "
                f"seed {expected[0]} over {expected[1]}. Resume with the stage's own task set"
            )
        self._pass = snapshot["pass"]
        self._position = snapshot["position"]
        self._order = self._permutation()
        self._quarantined = set(snapshot["quarantined"])
        self._records = {task: TaskRecord(*row) for task, row in snapshot["records"].items()}
        self._back_in_pass = dict(snapshot["back_in_pass"])

    def _advance(self) -> str:
        if self._position == len(self._order):
            self._pass += 1
            self._position = 0
            self._order = self._permutation()
        task = self._tasks[self._order[self._position]]
        self._position += 1
        return task

    def _permutation(self) -> list[int]:
        generator = np.random.default_rng([self._seed, self._pass])
        return [int(index) for index in generator.permutation(len(self._tasks))]
