import pytest
from hypothesis import given
from hypothesis import strategies as st
from weight_sync.core.plan import Link, anchor_due, chain, newest_anchor, prunable, stuck
from weight_sync.errors import AnchorRequired, PayloadMissing


@st.composite
def histories(draw: st.DrawFn) -> dict[int, Link]:
    """Stores as publishers make them: each delta's base is an earlier version."""
    count = draw(st.integers(1, 25))
    links: dict[int, Link] = {}
    number = 0
    for _ in range(count):
        number += draw(st.integers(1, 3))
        base = draw(st.sampled_from([0, *links])) if links else 0
        links[number] = Link(number, base)
    return links


def replay(links: dict[int, Link], steps: list[int], held: int) -> int:
    """Apply versions like a receiver: a delta only onto its base."""
    for number in steps:
        base = links[number].base
        assert base in (0, held)
        held = number
    return held


@given(histories(), st.data())
def test_a_chain_leads_from_what_is_held_to_the_target(
    links: dict[int, Link], data: st.DataObject
) -> None:
    target = data.draw(st.sampled_from(sorted(links)))
    held = data.draw(st.sampled_from([0, *links]))
    assert replay(links, chain(links, target, held=[held] if held else []), held) == target


@given(histories(), st.data())
def test_pruning_leaves_every_live_receiver_a_way_to_the_newest(
    links: dict[int, Link], data: st.DataObject
) -> None:
    held = set(data.draw(st.lists(st.sampled_from(sorted(links)), max_size=4)))
    targets = set(data.draw(st.lists(st.sampled_from(sorted(links)), max_size=2)))
    keep_latest = data.draw(st.integers(1, 4))
    gone = prunable(links, targets=targets, keep_latest=keep_latest)
    left = {number: link for number, link in links.items() if number not in gone}
    for goal in {max(links), *targets}:
        for start in {0, *held}:
            # The very same chain as before: not a longer way round.
            assert chain(left, goal, held=[start] if start else []) == chain(
                links, goal, held=[start] if start else []
            )
    for number in sorted(links)[-keep_latest:]:
        assert number in left


@given(histories())
def test_a_crash_between_two_deletions_strands_nobody(
    links: dict[int, Link],
) -> None:
    gone = prunable(links, targets=(), keep_latest=1)
    for done in range(len(gone) + 1):
        left = {n: link for n, link in links.items() if n not in gone[:done]}
        for number in left:
            # Whatever is still there can be rebuilt, or never could.
            assert chain(left, number) == chain(links, number)


def test_dense_history_keeps_only_the_latest_and_what_is_in_preparation() -> None:
    links = {number: Link(number, 0) for number in range(1, 8)}
    assert prunable(links, targets=[4], keep_latest=2) == [5, 3, 2, 1]


def test_a_late_joiner_starts_at_the_newest_anchor() -> None:
    links = {n: Link(n, base) for n, base in [(1, 0), (2, 1), (3, 0), (4, 3), (5, 4)]}
    assert chain(links, 5) == [3, 4, 5]
    assert chain(links, 5, held=[4]) == [5]
    assert chain(links, 5, held=[2]) == [3, 4, 5]
    assert chain(links, 5, held=[5]) == []
    assert newest_anchor(links.values()) == 3


def test_a_hole_in_the_chain_is_named() -> None:
    with pytest.raises(PayloadMissing, match="version 3 needs version 2, which is not in the"):
        chain({3: Link(3, 2)}, 3)


def test_a_chain_that_turns_on_itself_is_refused() -> None:
    with pytest.raises(AnchorRequired):
        chain({2: Link(2, 3), 3: Link(3, 2)}, 3)


def test_a_host_is_stuck_until_an_anchor_after_the_version_that_it_cannot_get_to() -> None:
    links = [Link(1, 0), Link(2, 1), Link(3, 2)]
    assert stuck(links, {}) == []
    assert stuck(links, {"b": 3, "a": 1}) == ["a", "b"]  # 1 is the anchor, damaged itself
    assert stuck([*links, Link(4, 0)], {"a": 3}) == []
    assert stuck([*links, Link(4, 0), Link(5, 4)], {"a": 3, "b": 5}) == ["b"]
    assert stuck([], {"a": 1}) == ["a"]


def test_anchors_come_first_and_then_every_so_often() -> None:
    made = []
    since = -1
    for _ in range(7):
        anchor = anchor_due(since_anchor=since, anchor_every=3)
        since = 0 if anchor else since + 1
        made.append(anchor)
    assert made == [True, False, False, True, False, False, True]
    assert anchor_due(since_anchor=0, anchor_every=1)
