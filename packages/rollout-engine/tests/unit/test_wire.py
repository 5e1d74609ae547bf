"""Values survive the trip through protobuf; malformed messages are refused with a reason."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_engine import wire
from rollout_engine.types import (
    Assignment,
    Attempt,
    AttemptId,
    AttemptLimits,
    AttemptTiming,
    BlobRef,
    Fault,
    FaultCause,
    FaultedTry,
    FaultStage,
    GroupKey,
    LimitKind,
    Outcome,
    Progress,
    Sampling,
    Segment,
    VersionSpan,
)
from service_kit.errors import DataLoss, InvalidArgument
from tailrace.rollout.v1 import rollout_service_pb2 as pb

names = st.text(min_size=1, max_size=40)
small = st.integers(0, 2**31 - 1)
big = st.integers(0, 2**63 - 1)
keys = st.builds(GroupKey, names, small)
attempt_ids = st.builds(AttemptId, keys, small, small)
seconds = st.floats(0, 1e6)
samplings = st.builds(
    Sampling, st.floats(0, 10), st.floats(0.01, 1), small, st.integers(-(2**63), 2**63 - 1)
)
limits = st.builds(AttemptLimits, small, small, small, small, seconds, small)
faults = st.builds(Fault, st.sampled_from(FaultStage), st.sampled_from(FaultCause), st.text())
assignments = st.builds(Assignment, keys, names, st.integers(1, 99), samplings, limits, big, big)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    n = draw(st.integers(0, 12))
    return Segment(
        draw(small),
        draw(st.integers(-1, 9)),
        np.array(draw(st.lists(small, min_size=n, max_size=n)), np.int32),
        np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), np.bool_),
        np.array(draw(st.lists(st.floats(-20, 0), min_size=n, max_size=n)), np.float32),
        tuple(draw(st.lists(st.builds(VersionSpan, small, small, big, big), max_size=3))),
        draw(samplings),
        tuple(draw(st.lists(st.builds(BlobRef, names, names, big, names), max_size=2))),
    )


attempts = st.builds(
    Attempt,
    attempt_ids,
    names,
    st.sampled_from(Outcome),
    st.sampled_from([0.0, 1.0]),
    st.booleans(),
    st.none() | st.sampled_from(LimitKind),
    st.none() | faults,
    small,
    st.lists(segments(), max_size=2).map(tuple),
    st.builds(AttemptTiming, seconds, seconds, seconds, seconds, seconds, seconds),
    st.text(),
    st.text(),
    st.binary(),
    seconds,
)


@given(attempts)
def test_an_attempt_survives_serialisation(attempt: Attempt) -> None:
    assert wire.attempt_from_bytes(wire.attempt_to_bytes(attempt)) == attempt


@given(assignments)
def test_an_assignment_survives_serialisation(assignment: Assignment) -> None:
    assert wire.assignment_from_bytes(wire.assignment_to_bytes(assignment)) == assignment


@given(st.builds(FaultedTry, attempt_ids, faults, small))
def test_a_faulted_try_survives_the_wire(faulted: FaultedTry) -> None:
    assert wire.faulted_try_from_proto(wire.faulted_try_to_proto(faulted)) == faulted


@given(
    st.builds(
        Progress, small, small, small, big, st.dictionaries(st.sampled_from(Outcome), big), big
    )
)
def test_progress_survives_the_wire(progress: Progress) -> None:
    assert wire.progress_from_proto(wire.progress_to_proto(progress)) == progress


@given(st.binary(min_size=1, max_size=200), st.integers(1, 64))
def test_chunks_join_to_the_bytes_and_only_the_last_carries_the_checksum(
    data: bytes, chunk_bytes: int
) -> None:
    key = GroupKey("g", 1)
    chunks = list(wire.attempt_chunks(key, 3, data, wire.checksum(data), chunk_bytes))
    assert b"".join(chunk.data for chunk in chunks) == data
    assert [chunk.offset for chunk in chunks] == list(range(0, len(data), chunk_bytes))
    assert {chunk.total for chunk in chunks} == {len(data)}
    assert [chunk.checksum != 0 for chunk in chunks[:-1]] == [False] * (len(chunks) - 1)
    assert chunks[-1].checksum == wire.checksum(data)


def test_every_chunk_stays_below_the_message_limit() -> None:
    data = bytes(3 * wire.MAX_CHUNK_BYTES + 1)
    sizes = [c.ByteSize() for c in wire.attempt_chunks(GroupKey("g" * 255, 1), 0, data, 1)]
    assert max(sizes) <= 1024 * 1024
    assert len(sizes) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attempts": 0}, "0 attempts"),
        ({"group_id": ""}, "group_id"),
        ({"task_id": "t" * 256}, "task_id has 256"),
        ({"assignment_epoch": -1}, "assignment_epoch"),
        ({"pin_version": -1}, "pin_version -1"),
        ({"sampling": pb.Sampling(top_p=1.5)}, "top_p is 1.5"),
        ({"sampling": pb.Sampling(temperature=math.nan)}, "temperature"),
        ({"limits": pb.AttemptLimits(turns=-1)}, "limits.turns is -1"),
        ({"limits": pb.AttemptLimits(command_time_s=math.inf)}, "limits.command_time_s"),
    ],
)
def test_a_malformed_assignment_is_refused_by_name(change: dict[str, object], words: str) -> None:
    fields: dict[str, object] = {"group_id": "g", "task_id": "t", "attempts": 2, **change}
    with pytest.raises(InvalidArgument, match=words):
        wire.assignment_from_proto(pb.Assign(**fields))  # type: ignore[arg-type]


def test_an_unset_top_p_means_one() -> None:
    assert wire.sampling_from_proto(pb.Sampling(temperature=1.0)).top_p == 1.0


def test_an_unset_or_unknown_enum_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="Outcome is unset"):
        wire.attempt_from_proto(pb.Attempt())
    unknown = pb.Attempt()
    unknown.outcome = 77  # type: ignore[assignment]
    with pytest.raises(InvalidArgument, match="77 is unknown"):
        wire.attempt_from_proto(unknown)


def test_arrays_of_different_lengths_are_data_loss() -> None:
    with pytest.raises(DataLoss, match="expected 4n, n and 4n"):
        wire.segment_from_proto(
            pb.Segment(token_ids=b"\0" * 8, loss_mask=b"\0\0", logprobs=b"\0" * 4)
        )


def test_bytes_that_are_no_attempt_are_data_loss() -> None:
    with pytest.raises(DataLoss, match="do not parse as an attempt"):
        wire.attempt_from_bytes(b"\xff\xff\xff")
