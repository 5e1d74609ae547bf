from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_engine.engines.cpu.prefix import PrefixIndex

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def common(a: list[int], b: list[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def test_the_longest_kept_start_is_found() -> None:
    index = PrefixIndex(100)
    index.insert([1, 2, 3, 4], 0)
    index.insert([1, 2, 5], 0)
    assert index.match([1, 2, 3, 9]).length == 3
    assert index.match([1, 2, 5, 6]).length == 3
    assert index.match([1, 2]).length == 2
    assert index.match([7]).length == 0


def test_what_sequences_have_in_common_is_kept_once() -> None:
    index = PrefixIndex(100)
    assert index.insert([1, 2, 3], 0)[0] == 0
    start, slots = index.insert([1, 2, 4, 5], 0)
    assert (start, len(slots)) == (2, 2)
    assert index.insert([1, 2, 4], 0) == (3, [])
    assert len(index) == 5
    assert index.match([1, 2, 3]).slots[:2] == index.match([1, 2, 4]).slots[:2]


def test_the_least_recently_used_leaves_first_and_from_its_end() -> None:
    index = PrefixIndex(6)
    index.insert([1, 1], 0)
    index.insert([2, 2], 0)
    index.insert([3, 3], 0)
    index.match([1, 1, 1])
    index.insert([4], 0)
    assert [index.match([t, t]).length for t in (1, 2, 3, 4)] == [2, 1, 2, 1]
    index.insert([5, 5], 0)
    # 1 was used longest ago, since the line above asked for all in order.
    assert [index.match([t, t]).length for t in (1, 2, 3, 4, 5)] == [0, 1, 2, 1, 2]


def test_a_shared_start_outlives_its_ends() -> None:
    index = PrefixIndex(5)
    index.insert([1, 1, 2], 0)
    index.insert([1, 1, 3], 0)
    index.insert([9, 9], 0)
    assert index.match([1, 1, 3]).length >= 2
    assert index.match([9, 9]).length == 2


def test_of_what_is_longer_than_all_there_is_the_start_is_kept() -> None:
    index = PrefixIndex(3)
    index.insert([1, 2], 0)
    assert len(index.insert([1, 2, 3, 4, 5], 0)[1]) == 1
    assert index.match([1, 2, 3, 4]).length == 3
    nothing = PrefixIndex(0)
    assert nothing.insert([1], 0) == (0, [])
    assert nothing.match([1]).length == 0


def test_the_oldest_epoch_of_a_match_is_reported() -> None:
    index = PrefixIndex(20)
    index.insert([1, 2], 5)
    index.insert([1, 2, 3], 7)
    index.insert([8, 8], 7)
    assert index.match([1, 2, 3]).epoch == 5
    assert index.match([8, 8]).epoch == 7


def test_clearing_gives_every_slot_back() -> None:
    index = PrefixIndex(4)
    index.insert([1, 2, 3], 0)
    index.clear()
    assert len(index) == 0
    assert index.match([1]).length == 0
    assert len(index.insert([5, 6, 7, 8], 0)[1]) == 4


@settings(max_examples=300)
@given(
    capacity=st.integers(0, 40),
    steps=st.lists(st.tuples(st.sampled_from(["insert", "match"]), TOKENS), max_size=40),
)
def test_slots_always_hold_what_they_are_handed_out_for(
    capacity: int, steps: list[tuple[str, list[int]]]
) -> None:
    index = PrefixIndex(capacity)
    memory: dict[int, tuple[int, ...]] = {}
    for what, tokens in steps:
        if what == "insert":
            start, slots = index.insert(tokens, 0)
            assert len(set(slots)) == len(slots)
            for offset, slot in enumerate(slots, start + 1):
                memory[slot] = tuple(tokens[:offset])
            assert start + len(slots) == min(len(tokens), max(capacity, start))
            assert index.match(tokens).length == start + len(slots)
        match = index.match(tokens)
        for offset, slot in enumerate(match.slots, 1):
            assert memory[slot] == tuple(tokens[:offset])
        assert len(index) <= capacity


@settings(max_examples=200)
@given(sequences=st.lists(TOKENS, max_size=20), asked=TOKENS)
def test_with_room_enough_it_agrees_with_a_plain_list(
    sequences: list[list[int]], asked: list[int]
) -> None:
    index = PrefixIndex(1000)
    for tokens in sequences:
        index.insert(tokens, 0)
    assert index.match(asked).length == max((common(s, asked) for s in sequences), default=0)
    starts = {tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)}
    assert len(index) == len(starts)
