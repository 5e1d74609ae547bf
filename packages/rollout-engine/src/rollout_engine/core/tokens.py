"""The tokens of an attempt as they come: a tree of segments, grown at its current leaf.

Sampled tokens and context are appended in the order in which the policy saw them. Buffers grow by
doubling, so a turn costs what it adds and no loop over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rollout_engine.types import (
    Logprobs,
    LossMask,
    Sampling,
    Segment,
    TokenIds,
    VersionSpan,
)

_FIRST_CAPACITY = 256
_Element = TypeVar("_Element", bound=np.generic)


class _Growing:
    """One segment under construction."""

    def __init__(self, parent_id: int) -> None:
        self.parent_id = parent_id
        self.length = 0
        self.token_ids: TokenIds = np.zeros(_FIRST_CAPACITY, np.int32)
        self.loss_mask: LossMask = np.zeros(_FIRST_CAPACITY, np.bool_)
        self.logprobs: Logprobs = np.zeros(_FIRST_CAPACITY, np.float32)
        self.versions: list[VersionSpan] = []

    def reserve(self, more: int) -> None:
        needed = self.length + more
        if needed <= len(self.token_ids):
            return
        capacity = max(needed, 2 * len(self.token_ids))
        self.token_ids = _grown(self.token_ids, capacity, self.length)
        self.loss_mask = _grown(self.loss_mask, capacity, self.length)
        self.logprobs = _grown(self.logprobs, capacity, self.length)


def _grown(array: NDArray[_Element], capacity: int, length: int) -> NDArray[_Element]:
    grown = np.zeros(capacity, array.dtype)
    grown[:length] = array[:length]
    return grown


class TokenTree:
    """Segments of one attempt; the last one made is the leaf that grows."""

    def __init__(self) -> None:
        self._segments = [_Growing(-1)]

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the policy sampled, over all segments."""
        return sum(int(s.loss_mask[: s.length].sum()) for s in self._segments)

    @property
    def context_tokens(self) -> int:
        """Length of the path from the root to the leaf."""
        return sum(segment.length for segment in self._path())

    def append_context(self, token_ids: TokenIds) -> None:
        """Append tokens that the policy reads.

        Args:
            token_ids: int32 [n].

        """
        leaf = self._segments[-1]
        leaf.reserve(len(token_ids))
        end = leaf.length + len(token_ids)
        leaf.token_ids[leaf.length : end] = token_ids
        leaf.length = end

    def append_sampled(
        self, token_ids: TokenIds, logprobs: Logprobs, versions: Sequence[VersionSpan]
    ) -> None:
        """Append tokens that the policy sampled.

        Args:
            token_ids: int32 [n].
            logprobs: float32 [n].
            versions: Cover `[0, n)` without gap or overlap.

        Raises:
            ValueError: Lengths differ, or the spans do not cover the tokens.

        """
        n = len(token_ids)
        if len(logprobs) != n:
            raise ValueError(f"{n} tokens came with {len(logprobs)} log-probabilities")
        _check_cover(versions, n)
        leaf = self._segments[-1]
        leaf.reserve(n)
        start, end = leaf.length, leaf.length + n
        leaf.token_ids[start:end] = token_ids
        leaf.logprobs[start:end] = logprobs
        leaf.loss_mask[start:end] = True
        leaf.length = end
        leaf.versions.extend(
            VersionSpan(s.start + start, s.end + start, s.version, s.oldest_kv_version)
            for s in versions
        )

    def branch(self, parent_id: int) -> int:
        """Begin a segment that continues another one, and give its id.

        Args:
            parent_id: An existing segment; -1 begins another root.

        """
        if not -1 <= parent_id < len(self._segments):
            raise ValueError(f"no segment {parent_id}; there are {len(self._segments)}")
        self._segments.append(_Growing(parent_id))
        return len(self._segments) - 1

    def context(self) -> TokenIds:
        """Give the tokens from the root to the leaf: what the policy sees next.

        Returns:
            int32 [n]; for a linear attempt a view, valid until the next append.

        """
        path = [segment.token_ids[: segment.length] for segment in self._path()]
        return path[0] if len(path) == 1 else np.concatenate(path)

    def freeze(self, sampling: Sampling) -> tuple[Segment, ...]:
        """Give the finished segments, in order of their ids; empty ones without children too."""
        return tuple(
            Segment(
                segment_id=index,
                parent_id=growing.parent_id,
                token_ids=growing.token_ids[: growing.length].copy(),
                loss_mask=growing.loss_mask[: growing.length].copy(),
                logprobs=growing.logprobs[: growing.length].copy(),
                versions=tuple(growing.versions),
                sampling=sampling,
            )
            for index, growing in enumerate(self._segments)
        )

    def _path(self) -> list[_Growing]:
        path = [self._segments[-1]]
        while path[-1].parent_id >= 0:
            path.append(self._segments[path[-1].parent_id])
        path.reverse()
        return path


def check_segments(segments: Sequence[Segment]) -> None:
    """Check what every attempt's segments promise.

    Raises:
        ValueError: A parent comes after its child or is missing, arrays differ in length, a
            log-probability stands where nothing was sampled, or the version spans do not cover
            exactly the sampled tokens.

    """
    seen: set[int] = set()
    for segment in segments:
        if segment.parent_id != -1 and segment.parent_id not in seen:
            raise ValueError(f"segment {segment.segment_id} has no parent {segment.parent_id}")
        if segment.segment_id in seen:
            raise ValueError(f"segment {segment.segment_id} stands twice")
        seen.add(segment.segment_id)
        n = len(segment.token_ids)
        if len(segment.loss_mask) != n or len(segment.logprobs) != n:
            raise ValueError(f"segment {segment.segment_id} has arrays of different lengths")
        if np.any(segment.logprobs[~segment.loss_mask]):
            raise ValueError(f"segment {segment.segment_id} has log-probabilities of context")
        covered = np.zeros(n, np.bool_)
        for span in segment.versions:
            if not 0 <= span.start < span.end <= n or covered[span.start : span.end].any():
                raise ValueError(f"segment {segment.segment_id} has a bad span {span}")
            covered[span.start : span.end] = True
        if not np.array_equal(covered, segment.loss_mask):
            raise ValueError(
                f"segment {segment.segment_id}: versions do not cover the sampled tokens"
            )


def _check_cover(versions: Sequence[VersionSpan], n: int) -> None:
    at = 0
    for span in versions:
        if span.start != at or span.end <= span.start:
            raise ValueError(f"span {span} does not follow token {at}")
        at = span.end
    if at != n:
        raise ValueError(f"version spans cover {at} of {n} sampled tokens")


__all__ = ["TokenTree", "check_segments"]
