"""The pure parts of what speaks E2B's protocols: envelopes, lines, cursors, listings, tags."""

import base64
import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_client.backends.e2b.lines import LineReader, input_line
from sandbox_client.backends.e2b.tags import Tags
from sandbox_client.e2b_api.entries import parse_entries
from sandbox_client.e2b_api.framing import (
    END_OF_STREAM,
    Envelope,
    EnvelopeReader,
    FramingError,
    end_of_stream,
    wrap,
)
from sandbox_client.e2b_api.metrics import parse_usage
from sandbox_client.e2b_api.paging import BadCursorError, page
from sandbox_client.types import SandboxClaim


def pieces(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """The data cut at these places, whatever order they come in."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


CUTS = st.lists(st.integers(min_value=0), max_size=20)


@given(st.lists(st.binary(max_size=300), max_size=8), CUTS)
def test_envelopes_come_out_as_they_went_in_however_they_are_cut(
    messages: list[bytes], cuts: list[int]
) -> None:
    stream = b"".join(map(wrap, messages)) + end_of_stream({"code": "x", "message": "y"})
    reader = EnvelopeReader(1000)
    found = [envelope for piece in pieces(stream, cuts) for envelope in reader.feed(piece)]
    reader.finish()
    assert [envelope.data for envelope in found[:-1]] == messages
    assert [envelope.ends_stream for envelope in found] == [False] * len(messages) + [True]
    assert json.loads(found[-1].data) == {"error": {"code": "x", "message": "y"}}


def test_an_envelope_is_flags_length_and_message() -> None:
    assert wrap(b"abc", END_OF_STREAM) == b"\x02\x00\x00\x00\x03abc"
    assert EnvelopeReader(3).feed(b"\x02\x00\x00\x00\x03abc") == [Envelope(2, b"abc")]
    assert end_of_stream() == wrap(b"{}", END_OF_STREAM)


@given(st.binary(min_size=1, max_size=50), st.integers(min_value=1))
def test_a_stream_cut_short_is_an_error(message: bytes, cut: int) -> None:
    whole = wrap(message)
    reader = EnvelopeReader(1000)
    assert reader.feed(whole[: cut % (len(whole) - 1) + 1]) == []
    with pytest.raises(FramingError, match="ends within"):
        reader.finish()


def test_a_message_over_the_bound_is_refused_by_its_prefix_alone() -> None:
    with pytest.raises(FramingError, match="1001 bytes"):
        EnvelopeReader(1000).feed(b"\x00\x00\x00\x03\xe9")
    assert EnvelopeReader(1000).feed(b"\x00\x00\x00\x03\xe8") == []


@pytest.mark.parametrize(("flags", "match"), [(1, "compressed"), (4, "unknown"), (3, "unknown")])
def test_what_is_not_plain_json_is_refused(flags: int, match: str) -> None:
    with pytest.raises(FramingError, match=match):
        EnvelopeReader(1000).feed(wrap(b"x", flags))


@given(st.lists(st.tuples(st.sampled_from("oed"), st.binary(max_size=200)), max_size=8), CUTS)
def test_lines_come_out_as_they_went_in_however_they_are_cut(
    sent: list[tuple[str, bytes]], cuts: list[int]
) -> None:
    text = "".join(f"{letter} {base64.b64encode(data).decode()}\n" for letter, data in sent)
    text += 'x {"exit_code": 0}\n'
    reader = LineReader()
    found = [line for piece in pieces(text.encode(), cuts) for line in reader.feed(piece.decode())]
    assert found == [*sent, ("x", {"exit_code": 0})]


@given(st.text(max_size=100))
def test_text_that_is_no_line_of_ours_does_not_stop_the_reader(noise: str) -> None:
    reader = LineReader()
    reader.feed(noise.replace("x ", "") + "\n")
    assert reader.feed("o aGk=\n") == [("o", b"hi")]


def test_input_travels_as_one_line() -> None:
    assert input_line(b"a\nb\xff") == "i YQpi/w==\n"


KEYS = st.lists(st.tuples(st.sampled_from([1.0, 2.0, 3.5]), st.text(max_size=3)), unique=True)


@given(KEYS, st.integers(1, 4), st.booleans())
def test_pages_give_every_item_once_in_order(
    keys: list[tuple[float, str]], limit: int, descending: bool
) -> None:
    items = [(key, key) for key in keys]
    found: list[tuple[float, str]] = []
    cursor = ""
    while True:
        shown, cursor = page(items, limit=limit, cursor=cursor, descending=descending)
        assert len(shown) <= limit
        found += shown
        if not cursor:
            break
        assert shown
    assert found == sorted(keys, reverse=descending)


def test_what_comes_and_goes_between_pages_neither_repeats_nor_hides_others() -> None:
    items = [((float(n), ""), n) for n in range(6)]
    first, cursor = page(items, limit=2)
    without_the_shown_and_one_more = items[3:]
    second, _ = page(without_the_shown_and_one_more, limit=2, cursor=cursor)
    assert (first, second) == ([0, 1], [3, 4])


@pytest.mark.parametrize("cursor", ["x", "!!", base64.b64encode(b"[1]").decode(), "eyJhIjoxfQ=="])
def test_a_made_up_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(BadCursorError):
        page([], limit=1, cursor=cursor)


def row(kind: str, path: bytes, *, size: bytes = b"5", target: bytes = b"") -> bytes:
    fields = [kind.encode(), size, b"644", b"-rw-r--r--", b"u", b"g", b"1600000000.5", path, target]
    return b"".join(field + b"\0" for field in fields)


def test_listings_are_read_field_by_field() -> None:
    output = row("f", b"/a/odd\nname") + row("l", b"/a/l", target=b"odd name") + row("s", b"/a/s")
    entries = parse_entries(output)
    assert [entry["path"] for entry in entries] == ["/a/l", "/a/odd\nname"]
    link, file = entries
    assert link["symlinkTarget"] == "odd name"
    assert file == {
        "name": "odd\nname",
        "type": "FILE_TYPE_FILE",
        "path": "/a/odd\nname",
        "size": "5",
        "mode": 0o644,
        "permissions": "rw-r--r--",
        "owner": "u",
        "group": "g",
        "modifiedTime": "2020-09-13T12:26:40.500000Z",
    }


def test_a_listing_cut_short_is_an_error() -> None:
    assert parse_entries(b"") == []
    whole = row("f", b"/a")
    for cut in (1, len(whole) // 2, len(whole) - 1):
        with pytest.raises(ValueError, match="fields"):
            parse_entries(whole[:cut])


def test_usage_is_read_whatever_a_program_is_called() -> None:
    def stats(uptime: float, ticks: int) -> str:
        times = f"S 1 1 1 0 -1 0 0 0 0 0 {ticks} 50 0 0"
        return f"{uptime} 9.9\n7 (a) b) {times}\n8 (x) Z\n"

    output = f"4096 1000 400\n\n9 100 1\n9 20 1\n\n{stats(10.0, 100)}\n{stats(10.5, 125)}"
    usage = parse_usage(output)
    assert (usage.disk_bytes, usage.memory_bytes) == (600 * 4096, 120 * 4096)
    assert usage.cpus == pytest.approx(0.5)
    with pytest.raises(ValueError, match="cannot be read"):
        parse_usage("")


NAMES = st.text(max_size=20)


@given(NAMES, NAMES, st.dictionaries(NAMES, NAMES, max_size=3), st.booleans())
def test_tags_are_read_again(text: str, other: str, mapping: dict[str, str], owned: bool) -> None:
    claim = SandboxClaim(text, other, "f", mapping) if owned else None
    tags = Tags("service", text, other, text, other, mapping, claim)
    assert Tags.read(tags.metadata()) == tags


def test_what_others_have_written_is_no_tag_of_ours() -> None:
    good = Tags("s", "i", "/w", "d", "t").metadata()
    assert Tags.read({}) is None
    assert Tags.read({**good, "tailrace-claim": "[]"}) is None
    assert Tags.read({**good, "tailrace-claim": "no json"}) is None
    assert Tags.read({key: value for key, value in good.items() if "sandbox" not in key}) is None
