"""Chooses the groups of the next step: oldest first, within the staleness bound."""

from __future__ import annotations

from collections.abc import Callable

from rollout_engine.types import Decision

from grpo_trainer.core.groups import Ages, TrainableGroup, ages, trainable_within
from grpo_trainer.errors import Stalled
from grpo_trainer.flow import GroupFlow
from grpo_trainer.rollouts import GroupSource

_LOOK_S = 5.0

Batch = dict[int, TrainableGroup]
"""Groups by ordinal, oldest first."""


class BatchSelector:
    """Waits for enough groups, and decides those that have become too old meanwhile.

    Args:
        flow: The stage's groups.
        source: Named in the error when nothing arrives.
        ending: Whether the stage is to end rather than to wait.
    """

    def __init__(self, flow: GroupFlow, source: GroupSource, ending: Callable[[], bool]) -> None:
        self._flow = flow
        self._source = source
        self._ending = ending
        self._ages: dict[int, Ages] = {}
        self._measured_at = -1

    async def next_batch(self) -> Batch | None:
        """Wait for the groups of a step.

        Returns:
            The groups; empty if none of a batch without back-fill has variance; None if the stage
            is to end.

        Raises:
            Stalled: Nothing arrived for too long.
        """
        flow = self._flow
        size, backfill = flow.config.batch_groups, flow.config.backfill
        while not self._ending():
            seen = flow.changes
            self._drop_stale()
            wanted = size if backfill else max(0, size - flow.skipped)
            if len(flow.ready) >= wanted:
                flow.skipped = 0 if backfill else max(0, flow.skipped - size)
                return {ordinal: flow.ready[ordinal] for ordinal in sorted(flow.ready)[:wanted]}
            self._check_stall()
            await flow.wait_changed(seen, timeout_s=_LOOK_S)
        return None

    def ages(self, group: TrainableGroup) -> Ages:
        """Measure a waiting group against the weights held now."""
        step = self._flow.context.policy.step
        if step != self._measured_at:
            self._measured_at = step
            self._ages = {}
        found = self._ages.get(group.ordinal)
        if found is None:
            bound = self._flow.config.admission.staleness_bound
            lineage = self._flow.context.policy.lineage
            found = self._ages[group.ordinal] = ages(group, lineage, step=step, bound=bound)
        return found

    def _drop_stale(self) -> None:
        flow = self._flow
        for group in list(flow.ready.values()):
            if not trainable_within(self.ages(group), flow.config.admission.over_bound):
                live = flow.book.find(group.finished.key)
                assert live is not None
                flow.decide(live, Decision.STALE)

    def _check_stall(self) -> None:
        limit_s = self._flow.config.stall_s
        silent_s = self._flow.context.clock() - self._flow.last_arrival_s
        if silent_s > limit_s:
            engines = ", ".join(
                f"{view.name} ({'connected' if view.connected else 'not connected'}, "
                f"{view.outstanding} groups out)"
                for view in self._source.engines()
            )
            raise Stalled(
                f"no group arrived for {silent_s:.0f} s (stall_s = {limit_s:g}); engines: "
                f"{engines}. Look at their logs, then start the stage again"
            )
