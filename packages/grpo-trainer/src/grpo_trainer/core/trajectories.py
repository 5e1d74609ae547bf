"""From an attempt's tree of segments to the sequences that are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rollout_engine.types import Attempt, Segment

NO_VERSION = 0


class MalformedAttempt(ValueError):  # noqa: N818 -- named as what it is
    """An attempt's arrays contradict each other, or hold values that are not finite."""


@dataclass(frozen=True, slots=True, eq=False)
class SampledSequence:
    """One path from a root to a leaf.

    Attributes:
        token_ids: int32 [n].
        sampled: bool [n], tokens that the policy sampled and that no earlier path of the attempt
            has; each sampled token of the attempt is in exactly one path.
        logprobs: float32 [n], as sampled; 0 elsewhere.
        versions: int64 [n], number of the weights that sampled the token; 0 elsewhere.
        kv_versions: int64 [n], oldest weights in the cache it attended to; 0 elsewhere.
    """

    token_ids: NDArray[np.int32]
    sampled: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]
    kv_versions: NDArray[np.int64]


def sampled_sequences(attempt: Attempt) -> tuple[SampledSequence, ...]:
    """Lay an attempt's tree out as paths, in the order of their leaves.

    Raises:
        MalformedAttempt: Says which segment and why.
    """
    segments = {segment.segment_id: segment for segment in attempt.segments}
    if len(segments) != len(attempt.segments):
        raise MalformedAttempt(f"attempt {attempt.id}: two segments have one id")
    versions = {segment.segment_id: _versions(attempt, segment) for segment in attempt.segments}
    parents = {segment.parent_id for segment in attempt.segments}
    counted: set[int] = set()
    paths = []
    for leaf in attempt.segments:
        if leaf.segment_id in parents:
            continue
        path = _path(attempt, segments, leaf)
        paths.append(_joined(path, versions, counted))
        counted.update(segment.segment_id for segment in path)
    return tuple(path for path in paths if len(path.token_ids))


def _path(attempt: Attempt, segments: dict[int, Segment], leaf: Segment) -> list[Segment]:
    path = [leaf]
    while path[-1].parent_id != -1:
        parent = segments.get(path[-1].parent_id)
        if parent is None or len(path) > len(segments):
            raise MalformedAttempt(
                f"attempt {attempt.id}: segment {path[-1].segment_id} has no way to a root"
            )
        path.append(parent)
    path.reverse()
    return path


def _joined(
    path: Sequence[Segment],
    versions: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]],
    counted: set[int],
) -> SampledSequence:
    sampled = np.concatenate(
        [
            np.zeros(len(segment), np.bool_) if segment.segment_id in counted else segment.loss_mask
            for segment in path
        ]
    )
    sequence = SampledSequence(
        token_ids=np.concatenate([segment.token_ids for segment in path]),
        sampled=sampled,
        logprobs=np.where(sampled, np.concatenate([s.logprobs for s in path]), np.float32(0)),
        versions=np.where(sampled, np.concatenate([versions[s.segment_id][0] for s in path]), 0),
        kv_versions=np.where(sampled, np.concatenate([versions[s.segment_id][1] for s in path]), 0),
    )
    if len(sampled) and sampled[0]:
        raise MalformedAttempt(
            f"segment {path[0].segment_id} begins with a sampled token; expected a prompt before it"
        )
    return sequence


def _versions(attempt: Attempt, segment: Segment) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    where = f"attempt {attempt.id}, segment {segment.segment_id}"
    tokens = len(segment.token_ids)
    if len(segment.loss_mask) != tokens or len(segment.logprobs) != tokens:
        raise MalformedAttempt(
            f"{where}: {tokens} tokens, {len(segment.loss_mask)} mask values and "
            f"{len(segment.logprobs)} log-probabilities; expected as many of each"
        )
    if not np.isfinite(segment.logprobs[segment.loss_mask]).all():
        raise MalformedAttempt(f"{where}: a log-probability is not finite")
    made = np.full(tokens, NO_VERSION, np.int64)
    attended = np.full(tokens, NO_VERSION, np.int64)
    for span in segment.versions:
        made[span.start : span.end] = span.version
        attended[span.start : span.end] = span.oldest_kv_version
    covered = np.zeros(tokens, np.bool_)
    for span in segment.versions:
        covered[span.start : span.end] = True
    if not np.array_equal(covered, segment.loss_mask):
        raise MalformedAttempt(f"{where}: the spans of versions do not cover its sampled tokens")
    return made, attended
