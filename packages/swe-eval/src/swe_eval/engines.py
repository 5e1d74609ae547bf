"""An evaluation's side of a rollout-engine: the consumer it needs, and what a group came to."""

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import grpc
from rollout_engine.client import GroupConsumer
from rollout_engine.types import Assignment, Decision, FinishedGroup, GroupKey, Purpose

from swe_eval.core.evaluation import GroupScore, Plan, VersionTokens, sum_tokens


class Consumer(Protocol):
    """What an evaluation uses of `rollout_engine.client.GroupConsumer`."""

    connected: bool
    last_contact_s: float

    @property
    def outstanding(self) -> frozenset[GroupKey]:
        """Groups assigned and not finished, those of an earlier life included."""
        ...

    async def run(self) -> None:
        """Owns the connection."""
        ...

    async def assign(self, assignment: Assignment) -> None:
        """Hands over a group."""
        ...

    async def next_finished(self) -> FinishedGroup:
        """The next finished group."""
        ...

    async def receive(self, cursor: int) -> None:
        """Acknowledges deliveries."""
        ...

    async def commit(self, key: GroupKey, decision: Decision, step: int = 0) -> None:
        """Tells what became of a group."""
        ...

    async def withdraw(self, key: GroupKey, reason: str) -> None:
        """Gives a group up."""
        ...

    async def settled(self) -> None:
        """Waits until every commit is acknowledged."""
        ...


MakeConsumer = Callable[[grpc.aio.Channel, str, int, int], Consumer]
"""From channel, consumer id, incarnation and cursor to a consumer."""


def group_consumer(
    channel: grpc.aio.Channel, consumer_id: str, incarnation: int, cursor: int
) -> Consumer:
    """The real consumer."""
    return GroupConsumer(
        channel,
        consumer_id=consumer_id,
        purpose=Purpose.EVALUATION,
        incarnation=incarnation,
        cursor=cursor,
    )


def score_group(group: FinishedGroup, plan: Plan) -> GroupScore:
    """What a group comes to. An attempt that ran into a limit of its own counts by its grade."""
    valid = group.valid_attempts
    tokens = sum_tokens(
        VersionTokens(
            version=span.version,
            oldest_kv_version=span.oldest_kv_version,
            tokens=span.end - span.start,
        )
        for attempt in valid
        for segment in attempt.segments
        for span in segment.versions
    )
    # The cache counts too: keys of other weights make another policy.
    versions = sorted({n for entry in tokens for n in (entry.version, entry.oldest_kv_version)})
    problem = ""
    if group.quarantined is not None:
        fault = group.quarantined
        problem = f"{fault.stage.value}, {fault.cause.value}: {fault.message}"
    elif len(valid) < plan.attempts:
        problem = f"only {len(valid)} of {plan.attempts} attempts are valid"
    elif plan.version and any(number != plan.version for number in versions):
        problem = (
            f"tokens sampled by, or attending to keys of, versions {versions} though "
            f"{plan.version} was pinned"
        )
    return GroupScore(
        task_id=group.task_id,
        epoch=group.key.epoch,
        solved=sum(attempt.reward >= 1.0 for attempt in valid),
        valid=len(valid),
        outcomes=dict(sorted(Counter(a.outcome.value for a in valid).items())),
        faults=dict(
            sorted(
                Counter(
                    f"{t.fault.stage.value}/{t.fault.cause.value}" for t in group.faulted_tries
                ).items()
            )
        ),
        version_tokens=tokens,
        problem=problem,
    )
