"""Tokens keep their order, masks, log-probabilities and versions, however they come."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_engine.core.tokens import TokenTree, check_segments
from rollout_engine.types import Sampling, Segment, VersionSpan


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def lps(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_a_turns_tokens_stand_after_its_prompt_with_shifted_spans() -> None:
    tree = TokenTree()
    tree.append_context(ids(1, 2, 3))
    tree.append_sampled(
        ids(4, 5, 6), lps(-1, -2, -3), [VersionSpan(0, 2, 7, 7), VersionSpan(2, 3, 8, 7)]
    )
    tree.append_context(ids(9))
    (segment,) = tree.freeze(Sampling(seed=5))
    assert segment.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 9]
    assert segment.loss_mask.tolist() == [False] * 3 + [True] * 3 + [False]
    assert segment.logprobs.tolist() == [0, 0, 0, -1, -2, -3, 0]
    assert segment.versions == (VersionSpan(3, 5, 7, 7), VersionSpan(5, 6, 8, 7))
    assert segment.sampling == Sampling(seed=5)
    assert (segment.parent_id, tree.sampled_tokens, tree.context_tokens) == (-1, 3, 7)


def test_a_branch_sees_its_parents_tokens_and_not_its_siblings() -> None:
    tree = TokenTree()
    tree.append_context(ids(1))
    first = tree.branch(0)
    tree.append_context(ids(2))
    second = tree.branch(0)
    tree.append_context(ids(3))
    assert tree.context().tolist() == [1, 3]
    segments = tree.freeze(Sampling())
    assert [(s.segment_id, s.parent_id) for s in segments] == [(0, -1), (first, 0), (second, 0)]
    check_segments(segments)


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [VersionSpan(0, 1, 1, 1)],
        [VersionSpan(0, 3, 1, 1)],
        [VersionSpan(1, 2, 1, 1)],
        [VersionSpan(0, 1, 1, 1), VersionSpan(0, 2, 1, 1)],
    ],
)
def test_spans_that_do_not_cover_the_sampled_tokens_are_refused(spans: list[VersionSpan]) -> None:
    with pytest.raises(ValueError, match="span"):
        TokenTree().append_sampled(ids(1, 2), lps(-1, -1), spans)


def test_a_missing_logprob_is_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens came with 1"):
        TokenTree().append_sampled(ids(1, 2), lps(-1), [VersionSpan(0, 2, 1, 1)])


pieces = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=300)),
    max_size=12,
)


@given(pieces)
def test_any_interleaving_is_kept_exactly(parts: list[tuple[bool, list[int]]]) -> None:
    tree = TokenTree()
    expected: list[int] = []
    mask: list[bool] = []
    for sampled, values in parts:
        if sampled:
            logprobs = np.full(len(values), -0.5, np.float32)
            tree.append_sampled(ids(*values), logprobs, [VersionSpan(0, len(values), 3, 2)])
        else:
            tree.append_context(ids(*values))
        expected += values
        mask += [sampled] * len(values)
        assert tree.context().tolist() == expected
    segments = tree.freeze(Sampling())
    assert segments[0].token_ids.tolist() == expected
    assert segments[0].loss_mask.tolist() == mask
    check_segments(segments)


def test_a_frozen_segment_does_not_change_with_the_tree() -> None:
    tree = TokenTree()
    tree.append_context(ids(1))
    (before,) = tree.freeze(Sampling())
    tree.append_context(ids(2))
    assert before.token_ids.tolist() == [1]


def segment(**changes: object) -> Segment:
    fields: dict[str, object] = {
        "segment_id": 0,
        "parent_id": -1,
        "token_ids": ids(1, 2),
        "loss_mask": np.array([False, True]),
        "logprobs": lps(0, -1),
        "versions": (VersionSpan(1, 2, 1, 1),),
        **changes,
    }
    return Segment(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parent_id": 4}, "no parent 4"),
        ({"logprobs": lps(0)}, "different lengths"),
        ({"logprobs": lps(-1, -1)}, "log-probabilities of context"),
        ({"versions": ()}, "do not cover"),
        ({"versions": (VersionSpan(0, 2, 1, 1),)}, "do not cover"),
        ({"versions": (VersionSpan(1, 3, 1, 1),)}, "bad span"),
    ],
)
def test_a_broken_segment_is_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_segments([segment(**changes)])


def test_whole_segments_pass_the_check() -> None:
    check_segments([segment(), segment(segment_id=1, parent_id=0)])
    with pytest.raises(ValueError, match="stands twice"):
        check_segments([segment(), segment()])
