import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_client.core.output import BoundedOutput, join_kept, split_kept

chunks = st.lists(st.binary(max_size=50), max_size=40)


@given(chunks, st.integers(1, 200))
def test_keeps_head_and_tail_and_counts_the_rest(parts: list[bytes], max_bytes: int) -> None:
    output = BoundedOutput(max_bytes)
    head = b"".join(output.feed(part) for part in parts)
    tail = output.finish()
    whole = b"".join(parts)
    assert len(head) + len(tail) + output.omitted_bytes == len(whole)
    assert len(head) + len(tail) <= max_bytes
    assert whole.startswith(head)
    assert whole.endswith(tail)
    if len(whole) <= max_bytes:
        assert head + tail == whole


@given(chunks, st.integers(1, 200))
def test_kept_output_splits_where_it_was_cut(parts: list[bytes], max_bytes: int) -> None:
    output = BoundedOutput(max_bytes)
    head = b"".join(output.feed(part) for part in parts)
    tail = output.finish()
    if output.omitted_bytes:
        assert split_kept(head + tail, output.omitted_bytes, max_bytes) == (head, tail)


def test_memory_stays_bounded_while_a_flood_is_fed() -> None:
    output = BoundedOutput(1000)
    for _ in range(10_000):
        output.feed(b"x" * 100)
    assert len(output._tail) < 20_000
    assert output.omitted_bytes == 999_000


def test_text_replaces_invalid_utf8_and_says_how_much_is_missing() -> None:
    assert join_kept(b"caf\xe9", 0, 10) == "caf�"
    assert join_kept(b"aabb", 7, 4) == "aa\n[7 bytes omitted]\nbb"


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BoundedOutput(0)
