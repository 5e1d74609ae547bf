"""Frozen values that cross this package's rooms and its public API. The wire form is in `wire.py`.

Names of enum members are those of the contract without its prefixes, and so are their values:
`Outcome.SOLVED == "SOLVED"` is what reports, counters and logs show.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]
LossMask = NDArray[np.bool_]
Logprobs = NDArray[np.float32]


class Purpose(enum.StrEnum):
    """What a consumer wants groups for."""

    TRAINING = "TRAINING"
    EVALUATION = "EVALUATION"


class Outcome(enum.StrEnum):
    """How an attempt ended: a closed set."""

    SOLVED = "SOLVED"
    UNSOLVED = "UNSOLVED"
    LIMIT_REACHED = "LIMIT_REACHED"
    FAULT = "FAULT"
    CANCELLED = "CANCELLED"

    @property
    def valid(self) -> bool:
        """Whether the policy made this end: it is trained on and counts in the baseline."""
        return self not in (Outcome.FAULT, Outcome.CANCELLED)


class LimitKind(enum.StrEnum):
    """Which limit of its own a policy used up."""

    TURNS = "TURNS"
    TOTAL_TOKENS = "TOTAL_TOKENS"
    TURN_TOKENS = "TURN_TOKENS"
    CONTEXT = "CONTEXT"
    COMMAND_TIME = "COMMAND_TIME"
    NO_PROGRESS = "NO_PROGRESS"


class FaultStage(enum.StrEnum):
    """Where an attempt was when infrastructure failed."""

    TASK = "TASK"
    SANDBOX_START = "SANDBOX_START"
    GENERATE = "GENERATE"
    COMMAND = "COMMAND"
    DIFF = "DIFF"
    GRADE = "GRADE"
    LEDGER = "LEDGER"
    INTERNAL = "INTERNAL"


class FaultCause(enum.StrEnum):
    """What failed."""

    SANDBOX = "SANDBOX"
    ENGINE = "ENGINE"
    GRADER = "GRADER"
    IMAGE = "IMAGE"
    NETWORK = "NETWORK"
    DEADLINE = "DEADLINE"
    QUOTA = "QUOTA"
    DISK = "DISK"
    TASK = "TASK"
    BUG = "BUG"
    INJECTED = "INJECTED"
    RESTART = "RESTART"


class Decision(enum.StrEnum):
    """What became of a group at its consumer."""

    TRAINED = "TRAINED"
    NO_VARIANCE = "NO_VARIANCE"
    STALE = "STALE"
    REFUSED = "REFUSED"
    WITHDRAWN = "WITHDRAWN"
    SCORED = "SCORED"


@dataclass(frozen=True, slots=True)
class Fault:
    """An infrastructure failure: where it struck, what failed, and the words of the error."""

    stage: FaultStage
    cause: FaultCause
    message: str = ""


@dataclass(frozen=True, slots=True, order=True)
class GroupKey:
    """A group under one assignment. A lost group is assigned again under the next epoch."""

    group_id: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.group_id}@{self.epoch}"


@dataclass(frozen=True, slots=True, order=True)
class AttemptId:
    """One try at one attempt of a group. A refill of a faulted try raises `try_number`."""

    key: GroupKey
    index: int
    try_number: int = 0

    def __str__(self) -> str:
        return f"{self.key}/{self.index}.{self.try_number}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: 0 means greedy.
        top_p: Nucleus, in (0, 1].
        top_k: 0 means off.
        seed: Attempt i of a group draws with a seed derived from this, the group id, i and its try.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    """What one attempt may use up. In an `Assignment`, 0 means the engine's configured default.

    Attributes:
        turns: Generations of the policy.
        turn_tokens: Tokens sampled in one turn.
        total_tokens: Tokens sampled in all turns together.
        context_tokens: Length of prompt and everything appended to it.
        command_time_s: Summed run time of the attempt's own commands, seconds.
        repeated_actions: The same actions this often in a row end the attempt.
    """

    turns: int = 0
    turn_tokens: int = 0
    total_tokens: int = 0
    context_tokens: int = 0
    command_time_s: float = 0.0
    repeated_actions: int = 0


@dataclass(frozen=True, slots=True)
class Assignment:
    """A group of attempts at one task that a consumer wants.

    Attributes:
        min_version: Start no attempt on weights older than this number; 0: any.
        pin_version: Demand exactly this version for every token; 0: any.
        traceparent: W3C trace context under which the attempts' spans hang.
    """

    key: GroupKey
    task_id: str
    attempts: int
    sampling: Sampling = field(default_factory=Sampling)
    limits: AttemptLimits = field(default_factory=AttemptLimits)
    min_version: int = 0
    pin_version: int = 0
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `[start, end)` of a segment, sampled by one version of the weights.

    Attributes:
        version: Number of the version that sampled them.
        oldest_kv_version: The oldest version in the KV cache that they attended to.
    """

    start: int
    end: int
    version: int
    oldest_kv_version: int


@dataclass(frozen=True, slots=True)
class BlobRef:
    """An optional large array kept beside the ledger, such as routed experts."""

    name: str
    uri: str
    size_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of tokens in an attempt's tree; a linear attempt has one, the root.

    Attributes:
        parent_id: `segment_id` of the segment it continues; -1 for a root.
        token_ids: int32 [n].
        loss_mask: bool [n], True where the policy sampled the token.
        logprobs: float32 [n], 0 where the mask is False.
        versions: Cover exactly the sampled tokens, in order.
    """

    segment_id: int
    parent_id: int
    token_ids: TokenIds
    loss_mask: LossMask
    logprobs: Logprobs
    versions: tuple[VersionSpan, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    blobs: tuple[BlobRef, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Segment):
            return NotImplemented
        return (
            self.segment_id == other.segment_id
            and self.parent_id == other.parent_id
            and np.array_equal(self.token_ids, other.token_ids)
            and np.array_equal(self.loss_mask, other.loss_mask)
            and np.array_equal(self.logprobs, other.logprobs)
            and self.versions == other.versions
            and self.sampling == other.sampling
            and self.blobs == other.blobs
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def sampled_tokens(self) -> int:
        """How many of its tokens the policy sampled."""
        return int(np.count_nonzero(self.loss_mask))


@dataclass(frozen=True, slots=True)
class AttemptTiming:
    """Seconds of an attempt by what they went for."""

    queue_s: float = 0.0
    sandbox_start_s: float = 0.0
    generate_s: float = 0.0
    command_s: float = 0.0
    grade_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """A finished attempt.

    Attributes:
        reward: 0 or 1, the grade; meaningful if `outcome.valid`.
        graded: Whether a grader ran. An attempt that left no diff is not graded and has reward 0.
        limit: Which limit was used up, for `LIMIT_REACHED`.
        fault: What failed, for `FAULT`.
        turns: Generations of the policy.
        grade_reason: Why it is unsolved, in the grader's words, or `empty_diff`.
        diff: The agent's changes, git format.
        finished_at_s: Unix time.
    """

    id: AttemptId
    task_id: str
    outcome: Outcome
    reward: float = 0.0
    graded: bool = False
    limit: LimitKind | None = None
    fault: Fault | None = None
    turns: int = 0
    segments: tuple[Segment, ...] = ()
    timing: AttemptTiming = field(default_factory=AttemptTiming)
    traceparent: str = ""
    grade_reason: str = ""
    diff: bytes = b""
    finished_at_s: float = 0.0

    @property
    def valid(self) -> bool:
        """Whether it may be trained on and counts in the group's baseline."""
        return self.outcome.valid

    @property
    def tokens(self) -> int:
        """Tokens of all its segments."""
        return sum(len(segment) for segment in self.segments)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return sum(segment.sampled_tokens for segment in self.segments)

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """Numbers of the versions that sampled its tokens, rising, each once."""
        return tuple(sorted({s.version for segment in self.segments for s in segment.versions}))


@dataclass(frozen=True, slots=True)
class FaultedTry:
    """A try that ended as `FAULT` and was made again, or given up.

    Attributes:
        tokens: Tokens that the policy had sampled in it.
    """

    attempt: AttemptId
    fault: Fault
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A group whose attempts have all ended.

    Attributes:
        cursor: Its place in the consumer's order of delivery; rises.
        attempts: One per index, in order. Those given up after too many faults are `FAULT`.
        quarantined: Set when the group could not be completed: its task's attempts keep faulting.
        faulted_tries: Every try that ended as `FAULT`, refilled ones included.
    """

    key: GroupKey
    task_id: str
    cursor: int
    attempts: tuple[Attempt, ...]
    quarantined: Fault | None = None
    faulted_tries: tuple[FaultedTry, ...] = ()

    @property
    def valid_attempts(self) -> tuple[Attempt, ...]:
        """Those that may be trained on; the baseline is taken over these alone."""
        return tuple(attempt for attempt in self.attempts if attempt.valid)


@dataclass(frozen=True, slots=True)
class Progress:
    """Figures of one engine for one consumer.

    Attributes:
        tokens_generated: Sampled for this consumer since the engine's start.
        outcomes: Ended attempts by outcome name since the engine's start, faulted tries included.
        oldest_running_version: Oldest version among the tokens of running attempts; 0: none.
    """

    groups_running: int = 0
    attempts_running: int = 0
    attempts_queued: int = 0
    tokens_generated: int = 0
    outcomes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    oldest_running_version: int = 0


__all__ = [
    "Assignment",
    "Attempt",
    "AttemptId",
    "AttemptLimits",
    "AttemptTiming",
    "BlobRef",
    "Decision",
    "Fault",
    "FaultCause",
    "FaultStage",
    "FaultedTry",
    "FinishedGroup",
    "GroupKey",
    "LimitKind",
    "Logprobs",
    "LossMask",
    "Outcome",
    "Progress",
    "Purpose",
    "Sampling",
    "Segment",
    "TokenIds",
    "VersionSpan",
]
