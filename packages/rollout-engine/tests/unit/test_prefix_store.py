from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_engine.engines.cpu.prefix import PrefixStore

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def common(a: list[int], b: list[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def kept(store: PrefixStore[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [entry.value for entry in store]


def test_the_longest_shared_prefix_is_found() -> None:
    store: PrefixStore[str] = PrefixStore(100)
    store.insert([1, 2, 3, 4], "a")
    store.insert([1, 2, 5], "b")
    length, entry = store.match([1, 2, 3, 9])
    assert (length, entry and entry.value) == (3, "a")
    length, entry = store.match([1, 2, 5, 6])
    assert (length, entry and entry.value) == (3, "b")
    assert store.match([7]) == (0, None)


def test_a_sequence_takes_the_place_of_its_own_prefix() -> None:
    store: PrefixStore[str] = PrefixStore(100)
    store.insert([1, 2], "turn 1")
    store.insert([1, 2, 3, 4], "turn 2")
    assert [entry.value for entry in store] == ["turn 2"]
    store.insert([1, 2, 3], "older")
    assert [entry.value for entry in store] == ["turn 2"]
    assert store.tokens == 4


def test_the_least_recently_used_leaves_first() -> None:
    store: PrefixStore[str] = PrefixStore(6)
    store.insert([1, 1], "a")
    store.insert([2, 2], "b")
    store.insert([3, 3], "c")
    store.match([1, 1, 1])
    store.insert([4, 4], "d")
    assert [entry.value for entry in store] == ["c", "a", "d"]


def test_what_is_larger_than_the_budget_is_not_kept() -> None:
    store: PrefixStore[str] = PrefixStore(3)
    store.insert([1, 2], "a")
    store.insert([1, 2, 3, 4], "b")
    assert [entry.value for entry in store] == ["a"]
    nothing: PrefixStore[str] = PrefixStore(0)
    nothing.insert([1], "a")
    assert len(nothing) == 0


@settings(max_examples=300, deadline=None)
@given(
    budget=st.integers(1, 40),
    steps=st.lists(st.tuples(st.sampled_from(["insert", "match", "clear"]), TOKENS), max_size=40),
)
def test_it_agrees_with_a_plain_list(budget: int, steps: list[tuple[str, list[int]]]) -> None:
    store: PrefixStore[tuple[int, ...]] = PrefixStore(budget)
    model: list[tuple[int, ...]] = []  # the latest used last
    for what, tokens in steps:
        if what == "insert":
            covered = any(common(list(m), tokens) == len(tokens) for m in model)
            store.insert(tokens, tuple(tokens))
            if len(tokens) <= budget and not covered:
                model = [m for m in model if common(list(m), tokens) < len(m)]
                model.append(tuple(tokens))
                while sum(map(len, model)) > budget:
                    model.pop(0)
        elif what == "match":
            length, entry = store.match(tokens)
            assert length == max((common(list(m), tokens) for m in model), default=0)
            if entry is not None:
                assert common(list(entry.value), tokens) == length
                model.remove(entry.value)
                model.append(entry.value)
        elif budget % 5 == 0:
            store.clear()
            model.clear()
        assert kept(store) == model
        assert store.tokens == sum(map(len, model))
        assert store.covers(tokens) == any(common(list(m), tokens) == len(tokens) for m in model)
