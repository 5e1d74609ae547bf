"""The coders are exact for every bit pattern, and refuse what they did not write."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from weight_sync.codecs import CODERS, Coder
from weight_sync.codecs.base import Words
from weight_sync.codecs.changes import find_changes
from weight_sync.codecs.ulp_gap import UlpGap
from weight_sync.errors import PayloadCorrupt

WIDTHS = (np.uint8, np.uint16, np.uint32, np.uint64)
# As bf16: zeros, ones, largest and smallest normal and subnormal numbers, infinities, NaNs quiet
# and signalling, with payloads; most of them are such patterns in fp16 too.
SPECIAL = np.array(
    [
        0x0000,
        0x3F80,
        0x7F7F,
        0x0080,
        0x007F,
        0x0001,
        0x7F80,
        0x7FC0,
        0x7F81,
        0x7FFF,
        0x7C00,
        0x7C01,
    ],
    np.uint16,
)
SPECIAL = np.concatenate([SPECIAL, SPECIAL | 0x8000])

coders = pytest.mark.parametrize("coder", CODERS.values(), ids=CODERS.keys())


def round_trip(coder: Coder, base: Words, new: Words) -> bytes:
    """Encode, apply to a copy of the base, compare the bits; return the body."""
    body = coder.encode(base, new, base.size)
    assert body is not None
    found = base.copy()
    if body:
        coder.apply(memoryview(body), found)
    assert found.tobytes() == new.tobytes()
    assert bool(body) == bool((base != new).any())
    return body


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Words, Words]:
    dtype = draw(st.sampled_from(WIDTHS))
    size = draw(st.integers(1, 300))
    base = draw(hnp.arrays(dtype, size))
    new = base.copy()
    at = draw(st.lists(st.integers(0, size - 1), max_size=40))
    for index in at:
        new[index] = draw(hnp.from_dtype(np.dtype(dtype)))
    return base, new


@coders
@given(pair=pairs())
def test_what_is_applied_is_what_was_encoded(coder: Coder, pair: tuple[Words, Words]) -> None:
    round_trip(coder, *pair)


@coders
def test_every_special_pattern_turns_into_every_other(coder: Coder) -> None:
    base, new = (grid.reshape(-1) for grid in np.meshgrid(SPECIAL, SPECIAL))
    round_trip(coder, base, new)


@coders
def test_every_step_between_16_bit_patterns_is_exact(coder: Coder) -> None:
    """All steps, each from a random pattern: 30 x 2^16 of the 2^32 pairs."""
    rng = np.random.default_rng(0)
    steps = np.arange(1 << 16, dtype=np.uint16)
    for _ in range(30):
        base = rng.integers(0, 1 << 16, steps.size, np.uint16)
        round_trip(coder, base, base + steps)


@coders
@pytest.mark.parametrize("dtype", WIDTHS)
def test_the_widest_steps_of_each_width_are_exact(coder: Coder, dtype: type[Any]) -> None:
    top = np.iinfo(dtype).max
    base = np.array([0, top, 0, top, top // 2, top // 2 + 1], dtype)
    new = np.array([top, 0, top // 2 + 1, top // 2, top // 2 + 1, top // 2], dtype)
    round_trip(coder, base, new)


@coders
@pytest.mark.parametrize("share", [0.0001, 0.01, 0.05, 0.3, 0.9, 1.0])
def test_all_densities_over_several_windows(coder: Coder, share: float) -> None:
    rng = np.random.default_rng(int(share * 1e4))
    base = rng.integers(0, 1 << 16, 1_000_003, np.uint16)
    steps = rng.integers(1, 4, base.size, np.uint16) * (rng.random(base.size) < share)
    round_trip(coder, base, base + steps.astype(np.uint16))


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("reaches", [1, 2, 7])
def test_gaps_longer_than_a_byte_can_tell(reaches: int, extra: int) -> None:
    """Many neighbours, then one far away: the gap between takes null changes, or just not."""
    base = np.zeros(40_000, np.uint16)
    new = base.copy()
    new[: base.size // 8] = 1
    first = base.size // 8
    # One in eight changed: no low bits, so a gap of 256 is the first too long.
    new[first + reaches * 256 + extra] = 9
    new[-1] = 5
    round_trip(UlpGap(), base, new)


def test_a_lone_change_at_either_end() -> None:
    base = np.zeros(1 << 20, np.uint16)
    for at in (0, 255, 256, 65_535, 65_536, base.size - 1):
        new = base.copy()
        new[at] = 0x8000
        assert len(round_trip(UlpGap(), base, new)) < 96


@coders
def test_more_changes_than_allowed_are_not_encoded(coder: Coder) -> None:
    base = np.zeros(1000, np.uint16)
    new = base.copy()
    new[:500] = 1
    assert coder.encode(base, new, 500)
    assert coder.encode(base, new, 499) is None


def test_bodies_of_small_steps_are_near_the_entropy_of_their_places() -> None:
    rng = np.random.default_rng(1)
    share = 0.01
    base = rng.integers(0, 1 << 16, 1 << 22, np.uint16)
    changed = rng.random(base.size) < share
    # Steps of one ulp either way: a bit each.
    steps = np.where(rng.random(base.size) < 0.5, 1, 0xFFFF).astype(np.uint16) * changed
    body = round_trip(UlpGap(), base, base + steps)
    places_bits = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
    floor_bytes = base.size * (places_bits + share) / 8
    assert len(body) < 1.03 * floor_bytes


def test_overwriting_twice_or_over_a_torn_base_changes_nothing_more() -> None:
    rng = np.random.default_rng(2)
    base = rng.integers(0, 1 << 16, 5000, np.uint16)
    new = base.copy()
    new[::7] ^= 5
    body = CODERS["overwrite"].encode(base, new, base.size)
    assert body
    torn = base.copy()
    torn[:2500] = new[:2500]
    for _ in range(2):
        CODERS["overwrite"].apply(memoryview(body), torn)
        np.testing.assert_array_equal(torn, new)


@coders
@given(noise=st.binary(max_size=200))
def test_noise_is_refused_and_nothing_worse(coder: Coder, noise: bytes) -> None:
    with suppress(PayloadCorrupt):
        coder.apply(memoryview(noise), np.zeros(64, np.uint16))


def flipped(body: bytes) -> list[bytes]:
    out = []
    for bit in range(8 * len(body)):
        changed = bytearray(body)
        changed[bit // 8] ^= 1 << (bit % 8)
        out.append(bytes(changed))
    return out


def cut(body: bytes) -> list[bytes]:
    return [body[:length] for length in range(len(body))]


@coders
@pytest.mark.parametrize("damage", [flipped, cut])
def test_damage_is_refused_or_shows_in_the_result_and_nothing_worse(
    coder: Coder, damage: Callable[[bytes], list[bytes]]
) -> None:
    base = np.arange(3000, dtype=np.uint16)
    new = base.copy()
    new[5::60] += np.arange(50, dtype=np.uint16) ** 3
    body = coder.encode(base, new, base.size)
    assert body
    for changed in damage(body):
        found = base.copy()
        with suppress(PayloadCorrupt):
            coder.apply(memoryview(changed), found)


@coders
def test_a_cut_body_is_refused(coder: Coder) -> None:
    base = np.arange(3000, dtype=np.uint16)
    new = base.copy()
    new[5::60] += 1
    body = coder.encode(base, new, base.size)
    assert body
    for changed in cut(body):
        with pytest.raises(PayloadCorrupt):
            coder.apply(memoryview(changed), base.copy())


@coders
def test_a_body_for_fewer_words_is_refused(coder: Coder) -> None:
    base = np.zeros(3000, np.uint16)
    new = base.copy()
    new[-1] = 1
    body = coder.encode(base, new, base.size)
    assert body
    with pytest.raises(PayloadCorrupt):
        coder.apply(memoryview(body), base[:-1].copy())


def test_a_frame_that_claims_all_memory_is_refused() -> None:
    """A damaged size must be compared, not believed."""
    import zstandard

    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(1 << 20)))
    size = (1 << 20).to_bytes(4, "little")
    at = frame.index(size)
    frame[at : at + 4] = (0xFFFFFFF0).to_bytes(4, "little")
    with pytest.raises(PayloadCorrupt, match="expected a zstd frame of 1048576 bytes, found 429"):
        CODERS["xor"].apply(memoryview(bytes(frame)), np.zeros(1 << 19, np.uint16))


@pytest.mark.parametrize("share", [0.001, 0.03, 0.08, 0.5])
def test_changes_are_found_where_they_are(share: float) -> None:
    """Each way that numpy looks for flags, over windows that are whole and one that is not."""
    rng = np.random.default_rng(3)
    base = rng.integers(0, 1 << 16, 700_001, np.uint16)
    new = base + (rng.random(base.size) < share).astype(np.uint16) * np.uint16(3)
    found = find_changes(base, new, base.size)
    assert found is not None
    np.testing.assert_array_equal(found[0], np.flatnonzero(base != new))
    assert (found[1] == 3).all()
