from __future__ import annotations

import numpy as np
import pytest
from grpo_trainer.core.groups import TrainableGroup as Group
from grpo_trainer.core.groups import (
    ages,
    has_variance,
    tokens_off_lineage,
    trainable_within,
    valid_attempts,
    with_shuffled_rewards,
)
from grpo_trainer.core.staleness import Lineage, LineageVersion
from grpo_trainer.core.trajectories import MalformedAttempt, sampled_sequences
from rollout_engine.types import (
    Attempt,
    AttemptId,
    FinishedGroup,
    GroupKey,
    Outcome,
    Segment,
    VersionSpan,
)

KEY = GroupKey("g-000000", 1)


def segment(
    number: int,
    parent: int,
    mask: str,
    *spans: tuple[int, int, int, int],
    first_token: int = 0,
) -> Segment:
    """Make a segment; in `mask` an `s` is a sampled token."""
    sampled = np.array([mark == "s" for mark in mask])
    return Segment(
        number,
        parent,
        np.arange(first_token, first_token + len(mask), dtype=np.int32),
        sampled,
        np.where(sampled, -0.5, 0).astype(np.float32),
        tuple(VersionSpan(*span) for span in spans),
    )


def attempt(
    *segments: Segment, index: int = 0, reward: float = 0.0, outcome: Outcome = Outcome.UNSOLVED
) -> Attempt:
    return Attempt(AttemptId(KEY, index), "t", outcome, reward, segments=segments)


def test_a_linear_attempt_is_one_sequence_with_the_version_of_every_token() -> None:
    (path,) = sampled_sequences(attempt(segment(0, -1, "ppsspps", (2, 4, 5, 4), (6, 7, 6, 6))))
    assert path.token_ids.tolist() == list(range(7))
    assert path.sampled.tolist() == [False, False, True, True, False, False, True]
    assert path.versions.tolist() == [0, 0, 5, 5, 0, 0, 6]
    assert path.kv_versions.tolist() == [0, 0, 4, 4, 0, 0, 6]


def test_each_sampled_token_of_a_tree_counts_in_exactly_one_path() -> None:
    root = segment(0, -1, "ppss", (2, 4, 1, 1))
    left = segment(1, 0, "ps", (1, 2, 1, 1), first_token=10)
    right = segment(2, 0, "pss", (1, 3, 2, 1), first_token=20)
    paths = sampled_sequences(attempt(root, left, right))
    assert [path.token_ids.tolist() for path in paths] == [
        [0, 1, 2, 3, 10, 11],
        [0, 1, 2, 3, 20, 21, 22],
    ]
    assert [int(path.sampled.sum()) for path in paths] == [3, 2]
    assert paths[1].sampled.tolist() == [False, False, False, False, False, True, True]
    assert paths[1].logprobs.tolist() == [0, 0, 0, 0, 0, -0.5, -0.5]


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        ((segment(0, -1, "ps"),), "spans of versions do not cover"),
        ((segment(0, -1, "pp", (1, 2, 1, 1)),), "spans of versions do not cover"),
        ((segment(0, -1, "sp", (0, 1, 1, 1)),), "begins with a sampled token"),
        ((segment(0, 7, "pp"),), "no way to a root"),
        ((segment(0, -1, "p"), segment(0, -1, "p")), "two segments have one id"),
        ((segment(0, 1, "p"), segment(1, 0, "p"), segment(2, 1, "p")), "no way to a root"),
    ],
)
def test_attempts_that_contradict_themselves_are_refused(
    segments: tuple[Segment, ...], words: str
) -> None:
    with pytest.raises(MalformedAttempt, match=words):
        sampled_sequences(attempt(*segments))


def test_arrays_of_different_lengths_are_refused() -> None:
    good = segment(0, -1, "ps", (1, 2, 1, 1))
    bad = Segment(0, -1, good.token_ids, good.loss_mask, good.logprobs[:1], good.versions)
    with pytest.raises(MalformedAttempt, match="2 tokens, 2 mask values and 1 log-prob"):
        sampled_sequences(attempt(bad))


def lineage() -> Lineage:
    return Lineage(LineageVersion(number, step) for number, step in [(1, 0), (2, 1), (5, 2)])


def group(*attempts: Attempt) -> Group:
    finished = FinishedGroup(KEY, "t", 1, attempts)
    return Group(finished, 0, valid_attempts(finished))


def test_ages_count_steps_of_each_token_and_what_is_beyond_the_bound() -> None:
    made = group(
        attempt(segment(0, -1, "psss", (1, 2, 1, 1), (2, 3, 2, 2), (3, 4, 5, 5))),
        attempt(segment(0, -1, "ps", (1, 2, 5, 2)), index=1, reward=1.0),
    )
    found = ages(made, lineage(), step=2, bound=1)
    assert found.by_attempt[0][0].tolist() == [0, 2, 1, 0]
    assert (found.masked, found.sampled) == (1, 4)
    # Fresh is what the present weights sampled over a cache of their own.
    assert found.fresh[0][0].tolist() == [False, False, False, True]
    assert found.fresh[1][0].tolist() == [False, False]
    assert trainable_within(found, "mask")
    assert not trainable_within(found, "drop")


def test_a_group_whose_tokens_are_all_too_old_is_not_trainable() -> None:
    made = group(attempt(segment(0, -1, "ps", (1, 2, 1, 1))))
    found = ages(made, lineage(), step=2, bound=1)
    assert not trainable_within(found, "mask")


def test_tokens_of_a_thrown_away_branch_age_by_the_way_back_and_forth() -> None:
    made = group(
        attempt(segment(0, -1, "psss", (1, 2, 1, 1), (2, 3, 3, 3), (3, 4, 4, 4))),
        attempt(segment(0, -1, "ps", (1, 2, 2, 2)), index=1),
    )
    assert tokens_off_lineage(made.attempts, lineage()) == 2
    found = ages(made, lineage(), step=2, bound=2)
    assert found.by_attempt[0][0].tolist() == [0, 2, 2, 3]  # 3 and 4 branched off at 2, of step 1
    assert found.masked == 1
    assert not found.fresh[0][0].any()


def test_only_valid_attempts_are_taken_and_variance_is_theirs() -> None:
    plain = segment(0, -1, "ps", (1, 2, 1, 1))
    made = group(
        attempt(plain),
        attempt(plain, index=1, reward=1.0, outcome=Outcome.FAULT),
        attempt(plain, index=2, outcome=Outcome.LIMIT_REACHED),
        attempt(plain, index=3, reward=1.0, outcome=Outcome.CANCELLED),
    )
    assert [member.attempt.id.index for member in made.attempts] == [0, 2]
    assert not has_variance(made.attempts)


def test_shuffling_deals_the_same_rewards_to_other_attempts() -> None:
    plain = segment(0, -1, "ps", (1, 2, 1, 1))
    made = group(*(attempt(plain, index=i, reward=float(i < 3)) for i in range(8)))
    dealt = [
        [a.reward for a in with_shuffled_rewards(made.attempts, np.random.default_rng(seed))]
        for seed in range(20)
    ]
    assert all(sorted(rewards) == [0.0] * 5 + [1.0] * 3 for rewards in dealt)
    assert len({tuple(rewards) for rewards in dealt}) > 10
