r"""Runs groups of agent attempts against SGLang engines and keeps every finished one.

The service is `python -m rollout_engine serve`; a consumer of it looks like this::

    async with open_channel(ChannelConfig(target="127.0.0.1:7104")) as channel:
        consumer = GroupConsumer(channel, consumer_id="me", purpose=Purpose.TRAINING, incarnation=1)
        connection = asyncio.create_task(consumer.run())
        await consumer.assign(Assignment(GroupKey("g-1", 0), "train-00001", attempts=8))
        group = await consumer.next_finished()
        rewards = [attempt.reward for attempt in group.valid_attempts]
        await consumer.receive(group.cursor)
        await consumer.commit(group.key, Decision.TRAINED, step=1)
        await consumer.settled()
        connection.cancel()

Nothing here imports torch. `rollout_engine.testing` has a whole engine in memory.
"""

from rollout_engine.agents.template import ChatTemplate, Message, RenderedConversation
from rollout_engine.client import ConsumerConfig, GroupConsumer
from rollout_engine.errors import (
    LedgerCorruptError,
    LedgerDiskFullError,
    LedgerError,
    LedgerUnusableError,
    RolloutError,
    TemplateError,
)
from rollout_engine.types import (
    Assignment,
    Attempt,
    AttemptId,
    AttemptLimits,
    AttemptTiming,
    BlobRef,
    Decision,
    Fault,
    FaultCause,
    FaultedTry,
    FaultStage,
    FinishedGroup,
    GroupKey,
    LimitKind,
    Outcome,
    Progress,
    Purpose,
    Sampling,
    Segment,
    VersionSpan,
)

__all__ = [
    "Assignment",
    "Attempt",
    "AttemptId",
    "AttemptLimits",
    "AttemptTiming",
    "BlobRef",
    "ChatTemplate",
    "ConsumerConfig",
    "Decision",
    "Fault",
    "FaultCause",
    "FaultStage",
    "FaultedTry",
    "FinishedGroup",
    "GroupConsumer",
    "GroupKey",
    "LedgerCorruptError",
    "LedgerDiskFullError",
    "LedgerError",
    "LedgerUnusableError",
    "LimitKind",
    "Message",
    "Outcome",
    "Progress",
    "Purpose",
    "RenderedConversation",
    "RolloutError",
    "Sampling",
    "Segment",
    "TemplateError",
    "VersionSpan",
]
