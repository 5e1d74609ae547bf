import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swe_eval.core.sampling import Candidate, draw, list_digest, stratified_order, stratum_of

pools = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=6), st.sampled_from(["x", "y", "z"]), max_size=40
).map(lambda d: [Candidate(task_id=t, stratum=s) for t, s in d.items()])


@given(pools, st.integers(0, 3))
def test_every_task_appears_once(pool: list[Candidate], seed: int) -> None:
    assert sorted(stratified_order(pool, seed=seed)) == sorted(c.task_id for c in pool)


@given(pools, st.integers(0, 3))
def test_every_prefix_keeps_the_shares_of_the_strata(pool: list[Candidate], seed: int) -> None:
    stratum_of = {c.task_id: c.stratum for c in pool}
    sizes = Counter(stratum_of.values())
    order = stratified_order(pool, seed=seed)
    for count in range(1, len(order) + 1):
        found = Counter(stratum_of[t] for t in order[:count])
        for stratum, size in sizes.items():
            fair = count * size / len(order)
            assert math.floor(fair) - 1 <= found[stratum] <= math.ceil(fair) + 1


@given(pools, st.randoms(), st.integers(0, 3))
def test_the_order_of_the_input_does_not_matter(pool, random, seed) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(pool)
    random.shuffle(shuffled)
    assert stratified_order(pool, seed=seed) == stratified_order(shuffled, seed=seed)


def test_another_seed_draws_other_tasks() -> None:
    pool = [Candidate(task_id=f"t{i}", stratum="x") for i in range(50)]
    assert draw(pool, count=10, seed=0) != draw(pool, count=10, seed=1)


def test_a_larger_draw_begins_with_the_smaller() -> None:
    pool = [Candidate(task_id=f"t{i}", stratum="xyz"[i % 3]) for i in range(50)]
    assert draw(pool, count=30, seed=4)[:12] == draw(pool, count=12, seed=4)


def test_zero_means_all_and_too_many_is_refused() -> None:
    pool = [Candidate(task_id=f"t{i}", stratum="x") for i in range(5)]
    assert len(draw(pool, count=0, seed=0)) == 5
    with pytest.raises(ValueError, match=r"0\.\.5"):
        draw(pool, count=6, seed=0)


def test_a_task_listed_twice_is_refused() -> None:
    pool = [Candidate(task_id="t", stratum="x"), Candidate(task_id="t", stratum="y")]
    with pytest.raises(ValueError, match="twice"):
        stratified_order(pool, seed=0)


def test_a_stratum_is_named_by_the_columns_asked_for() -> None:
    columns = {"repository": "django", "difficulty": "1-4 hours", "version": ""}
    assert stratum_of(columns, ["repository", "difficulty"]) == "django / 1-4 hours"
    assert stratum_of(columns, ["version", "repository"]) == "- / django"
    assert stratum_of(columns, []) == "all"


def test_the_digest_tells_lists_apart() -> None:
    digests = {list_digest(ids) for ids in (["ab", "c"], ["a", "bc"], ["c", "ab"], ["ab"], [])}
    assert len(digests) == 5
    assert all(d.startswith("sha256:") for d in digests)
