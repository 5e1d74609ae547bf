"""The edge to protobuf: every message of `tailrace.rollout.v1` to and from `types`.

Malformed messages raise `service_kit.errors.InvalidArgument`; bytes that do not match their
checksum or do not parse raise `DataLoss`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import xxhash
from google.protobuf.message import DecodeError
from service_kit.errors import DataLoss, InvalidArgument
from tailrace.common.v1 import outcome_pb2, version_pb2
from tailrace.rollout.v1 import rollout_service_pb2 as pb

from rollout_engine.types import (
    Assignment,
    Attempt,
    AttemptId,
    AttemptLimits,
    AttemptTiming,
    BlobRef,
    Fault,
    FaultedTry,
    GroupKey,
    Progress,
    Sampling,
    Segment,
    VersionSpan,
)
from rollout_engine.wire_enums import (
    FAULT_CAUSES,
    FAULT_STAGES,
    LIMIT_KINDS,
    OUTCOMES,
)

MAX_CHUNK_BYTES = 512 * 1024
"""Largest piece of an attempt in one message."""

MAX_ID_LENGTH = 255
"""Longest consumer id, group id or task id, in characters."""

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_BOOL = np.dtype(np.bool_)


def _identifier(value: str, field: str) -> str:
    if not 0 < len(value) <= MAX_ID_LENGTH:
        raise InvalidArgument(f"{field} has {len(value)} characters; expected 1 to {MAX_ID_LENGTH}")
    return value


def group_key(group_id: str, epoch: int) -> GroupKey:
    """Check and make the key that most messages carry in two fields."""
    if epoch < 0:
        raise InvalidArgument(f"assignment_epoch of {group_id!r} is {epoch}; expected >= 0")
    return GroupKey(_identifier(group_id, "group_id"), epoch)


def attempt_id_to_proto(attempt: AttemptId) -> version_pb2.AttemptId:
    """Encode an attempt's id."""
    message = version_pb2.AttemptId(
        group_id=attempt.key.group_id,
        assignment_epoch=attempt.key.epoch,
        index=attempt.index,
    )
    # `try` is a keyword of Python.
    setattr(message, "try", attempt.try_number)
    return message


def attempt_id_from_proto(message: version_pb2.AttemptId) -> AttemptId:
    """Decode an attempt's id."""
    return AttemptId(
        GroupKey(message.group_id, message.assignment_epoch),
        message.index,
        getattr(message, "try"),
    )


def fault_to_proto(fault: Fault) -> outcome_pb2.Fault:
    """Encode a fault."""
    return outcome_pb2.Fault(
        stage=FAULT_STAGES.to_proto(fault.stage),
        cause=FAULT_CAUSES.to_proto(fault.cause),
        message=fault.message,
    )


def fault_from_proto(message: outcome_pb2.Fault) -> Fault:
    """Decode a fault."""
    return Fault(
        FAULT_STAGES.from_proto(message.stage),
        FAULT_CAUSES.from_proto(message.cause),
        message.message,
    )


def sampling_to_proto(sampling: Sampling) -> pb.Sampling:
    """Encode sampling parameters."""
    return pb.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
    )


def sampling_from_proto(message: pb.Sampling) -> Sampling:
    """Decode sampling parameters; an unset `top_p` means 1."""
    top_p = message.top_p or 1.0
    if not 0.0 < top_p <= 1.0:
        raise InvalidArgument(f"top_p is {top_p}; expected above 0 and at most 1")
    if not (math.isfinite(message.temperature) and message.temperature >= 0.0):
        raise InvalidArgument(f"temperature is {message.temperature}; expected a number >= 0")
    return Sampling(message.temperature, top_p, max(0, message.top_k), message.seed)


def limits_to_proto(limits: AttemptLimits) -> pb.AttemptLimits:
    """Encode limits."""
    return pb.AttemptLimits(
        turns=limits.turns,
        turn_tokens=limits.turn_tokens,
        total_tokens=limits.total_tokens,
        context_tokens=limits.context_tokens,
        command_time_s=limits.command_time_s,
        repeated_actions=limits.repeated_actions,
    )


def limits_from_proto(message: pb.AttemptLimits) -> AttemptLimits:
    """Decode limits; 0 stays 0 and means the engine's default."""
    limits = AttemptLimits(
        turns=message.turns,
        turn_tokens=message.turn_tokens,
        total_tokens=message.total_tokens,
        context_tokens=message.context_tokens,
        command_time_s=message.command_time_s,
        repeated_actions=message.repeated_actions,
    )
    for name in AttemptLimits.__slots__:
        value = getattr(limits, name)
        if not (math.isfinite(value) and value >= 0):
            raise InvalidArgument(f"limits.{name} is {value}; expected a number >= 0")
    return limits


def assignment_to_proto(assignment: Assignment) -> pb.Assign:
    """Encode an assignment."""
    return pb.Assign(
        group_id=assignment.key.group_id,
        assignment_epoch=assignment.key.epoch,
        task_id=assignment.task_id,
        attempts=assignment.attempts,
        sampling=sampling_to_proto(assignment.sampling),
        limits=limits_to_proto(assignment.limits),
        min_version=assignment.min_version,
        pin_version=assignment.pin_version,
        traceparent=assignment.traceparent,
    )


def assignment_from_proto(message: pb.Assign) -> Assignment:
    """Decode and check an assignment."""
    if message.attempts < 1:
        raise InvalidArgument(
            f"group {message.group_id!r} asks for {message.attempts} attempts; expected >= 1"
        )
    if message.min_version < 0 or message.pin_version < 0:
        raise InvalidArgument(
            f"group {message.group_id!r} has min_version {message.min_version} and pin_version "
            f"{message.pin_version}; expected numbers >= 0"
        )
    return Assignment(
        key=group_key(message.group_id, message.assignment_epoch),
        task_id=_identifier(message.task_id, "task_id"),
        attempts=message.attempts,
        sampling=sampling_from_proto(message.sampling),
        limits=limits_from_proto(message.limits),
        min_version=message.min_version,
        pin_version=message.pin_version,
        traceparent=message.traceparent,
    )


def assignment_to_bytes(assignment: Assignment) -> bytes:
    """Serialise an assignment, for the ledger. Equal assignments give equal bytes."""
    return assignment_to_proto(assignment).SerializeToString(deterministic=True)


def assignment_from_bytes(data: bytes) -> Assignment:
    """Read an assignment back from the ledger."""
    return assignment_from_proto(_parsed(pb.Assign, data, "an assignment"))


def span_to_proto(span: VersionSpan) -> version_pb2.VersionSpan:
    """Encode a span of tokens made by one version."""
    return version_pb2.VersionSpan(
        start=span.start,
        end=span.end,
        version=span.version,
        oldest_kv_version=span.oldest_kv_version,
    )


def segment_to_proto(segment: Segment) -> pb.Segment:
    """Encode a segment; its arrays become little-endian bytes."""
    return pb.Segment(
        segment_id=segment.segment_id,
        parent_id=segment.parent_id,
        token_ids=segment.token_ids.astype(_INT32, copy=False).tobytes(),
        loss_mask=segment.loss_mask.astype(_BOOL, copy=False).tobytes(),
        logprobs=segment.logprobs.astype(_FLOAT32, copy=False).tobytes(),
        versions=[span_to_proto(span) for span in segment.versions],
        sampling=sampling_to_proto(segment.sampling),
        blobs=[
            pb.BlobRef(name=b.name, uri=b.uri, bytes=b.size_bytes, checksum=b.checksum)
            for b in segment.blobs
        ],
    )


def segment_from_proto(message: pb.Segment) -> Segment:
    """Decode a segment. Its arrays are read-only views of the message's bytes."""
    n = len(message.loss_mask)
    if len(message.token_ids) != 4 * n or len(message.logprobs) != 4 * n:
        raise DataLoss(
            f"segment {message.segment_id} has {len(message.token_ids)} bytes of ids, {n} of mask "
            f"and {len(message.logprobs)} of log-probabilities; expected 4n, n and 4n"
        )
    return Segment(
        segment_id=message.segment_id,
        parent_id=message.parent_id,
        token_ids=np.frombuffer(message.token_ids, _INT32),
        loss_mask=np.frombuffer(message.loss_mask, _BOOL),
        logprobs=np.frombuffer(message.logprobs, _FLOAT32),
        versions=tuple(
            VersionSpan(s.start, s.end, s.version, s.oldest_kv_version) for s in message.versions
        ),
        sampling=sampling_from_proto(message.sampling),
        blobs=tuple(BlobRef(b.name, b.uri, b.bytes, b.checksum) for b in message.blobs),
    )


def attempt_to_proto(attempt: Attempt) -> pb.Attempt:
    """Encode a finished attempt."""
    timing = attempt.timing
    return pb.Attempt(
        id=attempt_id_to_proto(attempt.id),
        task_id=attempt.task_id,
        outcome=OUTCOMES.to_proto(attempt.outcome),
        reward=attempt.reward,
        graded=attempt.graded,
        limit=LIMIT_KINDS.to_proto(attempt.limit),
        fault=None if attempt.fault is None else fault_to_proto(attempt.fault),
        turns=attempt.turns,
        segments=[segment_to_proto(segment) for segment in attempt.segments],
        timing=version_pb2.AttemptTiming(
            queue_s=timing.queue_s,
            sandbox_start_s=timing.sandbox_start_s,
            generate_s=timing.generate_s,
            command_s=timing.command_s,
            grade_s=timing.grade_s,
            total_s=timing.total_s,
        ),
        traceparent=attempt.traceparent,
        grade_reason=attempt.grade_reason,
        diff=attempt.diff,
        finished_at_s=attempt.finished_at_s,
    )


def attempt_from_proto(message: pb.Attempt) -> Attempt:
    """Decode a finished attempt."""
    timing = message.timing
    return Attempt(
        id=attempt_id_from_proto(message.id),
        task_id=message.task_id,
        outcome=OUTCOMES.from_proto(message.outcome),
        reward=message.reward,
        graded=message.graded,
        limit=LIMIT_KINDS.optional(message.limit),
        fault=fault_from_proto(message.fault) if message.HasField("fault") else None,
        turns=message.turns,
        segments=tuple(segment_from_proto(segment) for segment in message.segments),
        timing=AttemptTiming(
            timing.queue_s,
            timing.sandbox_start_s,
            timing.generate_s,
            timing.command_s,
            timing.grade_s,
            timing.total_s,
        ),
        traceparent=message.traceparent,
        grade_reason=message.grade_reason,
        diff=message.diff,
        finished_at_s=message.finished_at_s,
    )


def attempt_to_bytes(attempt: Attempt) -> bytes:
    """Serialise a finished attempt: what the ledger keeps and the stream carries in pieces."""
    return attempt_to_proto(attempt).SerializeToString()


def attempt_from_bytes(data: bytes) -> Attempt:
    """Read a serialised attempt."""
    return attempt_from_proto(_parsed(pb.Attempt, data, "an attempt"))


def checksum(data: bytes | bytearray | memoryview) -> int:
    """xxh3-64, as `AttemptChunk.checksum` and the ledger's rows carry it."""
    return xxhash.xxh3_64_intdigest(data)


def attempt_chunks(
    key: GroupKey, index: int, data: bytes, data_checksum: int, chunk_bytes: int = MAX_CHUNK_BYTES
) -> Iterator[pb.AttemptChunk]:
    """Cut a serialised attempt into messages; the last one carries the checksum."""
    total = len(data)
    for offset in range(0, total, chunk_bytes):
        piece = data[offset : offset + chunk_bytes]
        yield pb.AttemptChunk(
            group_id=key.group_id,
            assignment_epoch=key.epoch,
            index=index,
            offset=offset,
            total=total,
            data=piece,
            checksum=data_checksum if offset + len(piece) == total else 0,
        )


def faulted_try_to_proto(faulted: FaultedTry) -> pb.FaultedTry:
    """Encode a try that ended as a fault."""
    return pb.FaultedTry(
        attempt=attempt_id_to_proto(faulted.attempt),
        fault=fault_to_proto(faulted.fault),
        tokens=faulted.tokens,
    )


def faulted_try_from_proto(message: pb.FaultedTry) -> FaultedTry:
    """Decode a try that ended as a fault."""
    return FaultedTry(
        attempt_id_from_proto(message.attempt), fault_from_proto(message.fault), message.tokens
    )


def progress_to_proto(progress: Progress) -> pb.Progress:
    """Encode an engine's figures."""
    return pb.Progress(
        groups_running=progress.groups_running,
        attempts_running=progress.attempts_running,
        attempts_queued=progress.attempts_queued,
        tokens_generated=progress.tokens_generated,
        outcomes=progress.outcomes,
        oldest_running_version=progress.oldest_running_version,
    )


def progress_from_proto(message: pb.Progress) -> Progress:
    """Decode an engine's figures."""
    return Progress(
        groups_running=message.groups_running,
        attempts_running=message.attempts_running,
        attempts_queued=message.attempts_queued,
        tokens_generated=message.tokens_generated,
        outcomes=dict(message.outcomes),
        oldest_running_version=message.oldest_running_version,
    )


P = TypeVar("P", pb.Assign, pb.Attempt)


def _parsed(kind: type[P], data: bytes, what: str) -> P:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise DataLoss(f"{len(data)} bytes do not parse as {what}: {error}") from error
