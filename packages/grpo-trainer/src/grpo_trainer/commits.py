"""Tells engines what became of their groups, once that is on disk."""

from __future__ import annotations

from collections.abc import Iterable

from grpo_trainer.core.decisions import Claim, GroupBook, Verdict
from grpo_trainer.rollouts import GroupSource


class Commits:
    """Decisions on their way from a checkpoint to the engines that hold the groups.

    A decision stays in the checkpoints until its engine has acknowledged it, so that it is told
    again after a crash of either side.
    """

    def __init__(self, source: GroupSource) -> None:
        self._source = source
        self._told: set[Claim] = set()

    def settle(self, book: GroupBook) -> None:
        """Drop from the book what engines have acknowledged; call it before a checkpoint."""
        for key, engine in list(self._told):
            if key not in self._source.unacknowledged(engine):
                book.committed((key, engine))
                self._told.discard((key, engine))

    async def tell(self, verdicts: Iterable[Verdict]) -> None:
        """Tell decisions that a checkpoint holds; those of engines that are gone wait."""
        known = {view.name for view in self._source.engines()}
        for verdict in verdicts:
            if verdict.engine in known and verdict.claim not in self._told:
                self._told.add(verdict.claim)
                await self._source.commit(
                    verdict.engine, verdict.key, verdict.decision, verdict.step
                )
