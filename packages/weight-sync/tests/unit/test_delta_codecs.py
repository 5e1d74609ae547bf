"""A delta's payload file: whole models in, whole models out, and nothing else accepted."""

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weight_sync.codecs import CODERS, Delta, Tensor, anchor_codec, delta_codec
from weight_sync.codecs import delta as delta_file
from weight_sync.codecs.changes import sampled_share
from weight_sync.core.manifest import DTYPE_BYTES
from weight_sync.errors import ChecksumMismatch, PayloadCorrupt, UnknownCodec

codecs = pytest.mark.parametrize("codec", [delta_codec(name) for name in CODERS], ids=CODERS.keys())


def tensor(name: str, dtype: str, shape: tuple[int, ...], bits: bytes) -> Tensor:
    return Tensor(name, dtype, shape, memoryview(bytearray(bits)))


def copied(model: Iterable[Tensor]) -> dict[str, Tensor]:
    return {t.name: tensor(t.name, t.dtype, t.shape, bytes(t.data)) for t in model}


def encoded(
    codec: Delta, new: list[Tensor], base: list[Tensor], pool: Executor | None = None
) -> bytes:
    return b"".join(codec.encode(new, base, pool))


def assert_rebuilt(codec: Delta, new: list[Tensor], base: list[Tensor]) -> set[str]:
    """Encode, apply to a copy of the base, and compare every tensor; return those written to."""
    found = copied(base)
    touched = codec.apply(memoryview(encoded(codec, new, base)), found)
    for each in new:
        found[each.name].verify(each.entry())
    return touched


def model(sizes: dict[str, int], seed: int, dtype: str = "BF16") -> list[Tensor]:
    rng = np.random.default_rng(seed)
    return [
        tensor(name, dtype, (size,), rng.bytes(size * DTYPE_BYTES[dtype]))
        for name, size in sizes.items()
    ]


def stepped(base: list[Tensor], share: float, seed: int = 0) -> list[Tensor]:
    """The same tensors with so large a share of their elements one ulp off."""
    rng = np.random.default_rng(seed)
    new = list(copied(base).values())
    for each in new:
        words = each.words()
        words += (rng.random(words.size) < share).astype(words.dtype)
    return new


@st.composite
def model_pairs(draw: st.DrawFn) -> tuple[list[Tensor], list[Tensor]]:
    names = draw(st.lists(st.text("abc./é", min_size=1, max_size=5), max_size=6, unique=True))
    base, new = [], []
    for name in names:
        dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        size = int(np.prod(shape, dtype=int)) * DTYPE_BYTES[dtype]
        bits = draw(st.binary(min_size=size, max_size=size))
        changed = bytearray(bits)
        for at in draw(st.lists(st.integers(0, max(0, size - 1)), max_size=6)):
            if size:
                changed[at] = draw(st.integers(0, 255))
        base.append(tensor(name, dtype, shape, bits))
        new.append(tensor(name, dtype, shape, bytes(changed)))
    return base, new


@codecs
@given(pair=model_pairs(), dense_above=st.sampled_from([0.01, 0.5, 1.0]))
@settings(max_examples=60)
def test_any_model_turns_into_any_other_of_its_layout(
    codec: Delta, pair: tuple[list[Tensor], list[Tensor]], dense_above: float
) -> None:
    base, new = pair
    choosy = delta_codec(codec.id, dense_above=dense_above)
    touched = assert_rebuilt(choosy, new, base)
    changed = {n.name for n, o in zip(new, base, strict=True) if n.data != o.data}
    assert changed <= touched


SIZES = {"a": 40, "b": 3000, "c": 1 << 19, "d": 1, "e": (1 << 20) + 7, "f": 700}


@codecs
def test_models_of_many_blocks_are_rebuilt(codec: Delta, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_file, "BLOCK_BYTES", 1 << 19)
    monkeypatch.setattr(delta_file, "SMALL_BYTES", 1 << 13)
    base = model(SIZES, 1) + model({"g": 100, "h": 100}, 2, "F32")
    assert len(assert_rebuilt(codec, stepped(base, 0.02), base)) == 8


def block_heads(payload: bytes) -> list[tuple[int, ...]]:
    """Return the heads of a payload's blocks, found as the format says."""
    assert delta_file._FILE.unpack_from(payload)[3:] == (0, 0)  # no names: for all tensors
    at = delta_file._FILE.size
    heads = []
    while payload[at]:
        head = delta_file._BLOCK.unpack_from(payload, at)
        heads.append(head)
        at += delta_file._BLOCK.size + head[-1]
    assert at == len(payload) - 1
    return heads


def test_small_tensors_share_a_block_and_large_ones_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delta_file, "BLOCK_BYTES", 1 << 19)
    monkeypatch.setattr(delta_file, "SMALL_BYTES", 1 << 13)
    base = model(SIZES, 1) + model({"g": 100, "h": 100}, 2, "F32")
    heads = block_heads(encoded(delta_codec("xor"), stepped(base, 0.1), base))
    # kind, first, count, start, length. In order: BF16 small a b d f, large c e; F32 g h.
    assert [head[:5] for head in heads] == [
        (1, 0, 4, 0, 2 * (40 + 3000 + 1 + 700)),
        (1, 4, 1, 0, 1 << 19),
        (1, 4, 1, 1 << 19, 1 << 19),
        (1, 5, 1, 0, 1 << 19),
        (1, 5, 1, 1 << 19, 1 << 19),
        (1, 5, 1, 1 << 20, 1 << 19),
        (1, 5, 1, 3 << 19, 1 << 19),
        (2, 5, 1, 1 << 21, 14),  # too little to get smaller
        (1, 6, 2, 0, 800),
    ]


@codecs
def test_what_did_not_change_is_not_sent(codec: Delta) -> None:
    base = model({"a": 4000, "b": 1 << 20, "c": 1 << 20}, 1)
    new = list(copied(base).values())
    assert len(encoded(codec, new, base)) < 200
    new[1].words()[77] ^= 1
    assert assert_rebuilt(codec, new, base) == {"b"}
    assert len(encoded(codec, new, base)) < 400


@codecs
def test_above_the_crossover_a_block_goes_out_whole(codec: Delta) -> None:
    base = model({"a": 1 << 20, "b": 1 << 20}, 1)
    new = stepped(base, 0.2)[:1] + stepped(base, 0.4)[1:]
    kinds = {}
    for dense_above in (0.1, 0.3, 0.6):
        choosy = delta_codec(codec.id, dense_above=dense_above)
        assert_rebuilt(choosy, new, base)
        payload = encoded(choosy, new, base)
        kinds[dense_above] = [head[0] for head in block_heads(payload)]
        assert len(payload) < 4 * (1 << 20) + 200
    assert kinds == {0.1: [2, 2], 0.3: [1, 2], 0.6: [1, 1]}


def test_what_would_not_get_smaller_goes_out_whole() -> None:
    base, new = model({"a": 4000}, 1), model({"a": 4000}, 2)
    payload = encoded(delta_codec("overwrite", dense_above=1.0), new, base)
    assert [head[0] for head in block_heads(payload)] == [2]


@codecs
def test_a_pool_changes_nothing(codec: Delta, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_file, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(delta_file, "SMALL_BYTES", 1 << 10)
    base = model(SIZES, 1)
    new = stepped(base, 0.05)
    with ThreadPoolExecutor(4) as pool:
        payload = encoded(codec, new, base, pool)
        assert payload == encoded(codec, new, base)
        found = copied(base)
        codec.apply(memoryview(payload), found, pool)
    assert all(found[t.name].data == t.data for t in new)


class Waiting(Executor):
    """Runs at once, and counts what was submitted and not yet asked for."""

    def __init__(self) -> None:
        self.open = self.most = 0

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> "Future[Any]":
        pool = self
        self.open += 1
        self.most = max(self.most, self.open)

        class Counted(Future[Any]):
            def result(self, timeout: float | None = None) -> Any:
                pool.open -= 1
                return work(*args, **named)

        return Counted()


def test_encoding_keeps_few_blocks_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_file, "BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(delta_file, "SMALL_BYTES", 1 << 10)
    base = model({"a": 1 << 18}, 1)
    pool = Waiting()
    pieces = delta_codec("ulp-gap").encode(stepped(base, 0.05), base, pool)
    next(pieces)
    assert pool.most == 0
    assert sum(1 for _ in pieces) > 500
    assert pool.most <= 20
    assert pool.open == 0


def test_decoding_reads_the_base_from_the_memory_it_writes_to() -> None:
    base = model({"a": 1 << 10}, 1)
    new = stepped(base, 0.1)
    payload = encoded(delta_codec("ulp-gap"), new, base)
    onto = copied(base)
    memory = onto["a"].data
    delta_codec("ulp-gap").apply(memoryview(payload), onto)
    assert bytes(memory) == bytes(new[0].data)


@codecs
def test_a_base_of_another_layout_is_refused_when_encoding(codec: Delta) -> None:
    base = model({"a": 10}, 1)
    with pytest.raises(ValueError, match=r"tensor b: .*found no such tensor\. Publish an anchor"):
        list(codec.encode(model({"b": 10}, 1), base))
    with pytest.raises(ValueError, match=r"tensor a: .*BF16 \[11\] in its base, found BF16 \[10\]"):
        list(codec.encode(model({"a": 11}, 1), base))


def damaged_somewhere(payload: bytes) -> Iterable[bytes]:
    for bit in range(0, 8 * len(payload), 3):
        changed = bytearray(payload)
        changed[bit // 8] ^= 1 << (bit % 8)
        yield bytes(changed)


@codecs
def test_a_flipped_bit_is_refused_or_shows_in_a_checksum(codec: Delta) -> None:
    base = model({"a": 900, "b": 300}, 1)
    new = stepped(base, 0.1)
    payload = encoded(codec, new, base)
    for changed in damaged_somewhere(payload):
        found = copied(base)
        try:
            codec.apply(memoryview(changed), found)
        except PayloadCorrupt:
            continue
        wrong = [t.name for t in new if found[t.name].data != t.data]
        for name in wrong:
            with pytest.raises(ChecksumMismatch):
                found[name].verify(next(t for t in new if t.name == name).entry())


@codecs
def test_every_truncation_and_every_tail_is_refused(codec: Delta) -> None:
    base = model({"a": 300, "b": 30}, 1)
    payload = encoded(codec, stepped(base, 0.1), base)
    for length in range(len(payload)):
        with pytest.raises(PayloadCorrupt):
            codec.apply(memoryview(payload[:length]), copied(base))
    with pytest.raises(PayloadCorrupt, match="1 bytes follow the delta's end"):
        codec.apply(memoryview(payload + b"\0"), copied(base))


@given(noise=st.binary(max_size=120), behind_a_magic=st.booleans())
def test_noise_is_refused_and_nothing_worse(noise: bytes, behind_a_magic: bool) -> None:
    data = delta_file._MAGIC + noise if behind_a_magic else noise
    with suppress(PayloadCorrupt):
        delta_codec("ulp-gap").apply(memoryview(data), copied(model({"a": 5}, 1)))


def test_a_foreign_delta_is_refused() -> None:
    base = model({"a": 300, "b": 30}, 1)
    codec = delta_codec("ulp-gap")
    payload = memoryview(encoded(codec, stepped(base, 0.1), base))
    with pytest.raises(PayloadCorrupt, match="expected a delta of codec 'xor', found b'ulp-gap"):
        delta_codec("xor").apply(payload, copied(base))
    with pytest.raises(PayloadCorrupt, match="other names, dtypes or shapes"):
        codec.apply(payload, copied(base[:1]))
    with pytest.raises(PayloadCorrupt, match="other names, dtypes or shapes"):
        codec.apply(payload, copied(model({"a": 300, "b": 31}, 1)))
    with pytest.raises(PayloadCorrupt, match="other names, dtypes or shapes"):
        codec.apply(payload, copied(model({"a": 300, "b": 30}, 1, "F16")))
    with pytest.raises(PayloadCorrupt, match="begins with b'TWDELTA1'"):
        codec.apply(memoryview(bytes(100)), copied(base))


def test_a_block_that_comes_twice_is_refused() -> None:
    """Steps applied twice would be wrong, and XOR twice would undo itself."""
    base = model({"a": 300}, 1)
    payload = encoded(delta_codec("xor"), stepped(base, 0.1), base)
    block = payload[delta_file._FILE.size : -1]
    with pytest.raises(PayloadCorrupt, match="does not fit a delta"):
        delta_codec("xor").apply(memoryview(payload[:-1] + block + b"\0"), copied(base))


@codecs
def test_parts_of_a_model_make_a_whole(codec: Delta) -> None:
    """As several publishers write them, each its own tensors against the same base."""
    base = model({"a": 300, "b": 30, "empty": 0, "c": 5}, 1)
    new = stepped(base, 0.5)
    parts = [
        memoryview(b"".join(codec.encode(new[these], base[these], part=True)))
        for these in (slice(1), slice(1, 3), slice(3, 4))
    ]
    found = copied(base)
    touched: list[set[str]] = [codec.apply(part, found) for part in parts]
    assert touched == [{"a"}, {"b"}, {"c"}]
    assert all(found[t.name].data == t.data for t in new)
    with pytest.raises(PayloadCorrupt, match="names tensor b'b', unknown here or twice"):
        codec.apply(parts[1], copied(base[:1]))


@codecs
def test_a_wrong_base_shows_in_a_checksum(codec: Delta) -> None:
    base = model({"a": 3000}, 1)
    new = stepped(base, 0.1)
    other = stepped(base, 0.01, seed=9)
    found = {t.name: t for t in other}
    codec.apply(memoryview(encoded(codec, new, base)), found)
    with pytest.raises(ChecksumMismatch, match="tensor a: expected BF16"):
        found["a"].verify(new[0].entry())


def test_unknown_codecs_are_named() -> None:
    with pytest.raises(UnknownCodec, match=r"of an anchor names codec 'xor'; .* \['dense'\]"):
        anchor_codec("xor")
    with pytest.raises(UnknownCodec, match=r"of a delta names codec 'xor9'; .*'ulp-gap', 'xor'\]"):
        delta_codec("xor9")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_the_sampled_share_is_near_the_true_one(share: float) -> None:
    base = model({"small": 5000, "large": 3 << 20}, 1)
    assert sampled_share(stepped(base, share), base) == pytest.approx(share, abs=0.01)
    assert sampled_share([], []) == 0.0


HEAD = "ff88d5870904644ef6144b249ae1f91e00000000000000000100000000010000000000000000000000b0040000"
WRITTEN_BEFORE = {
    "ulp-gap": "545744454c544131756c702d676170000000000000000000"
    + HEAD
    + "4a0000000400000005010000000d0000000b0000000a0000000a000000908050100028b52ffd20042100000001"
    + "001128b52ffd2002110000241f28b52ffd2001090000f028b52ffd2001090000ff00",
    "xor": "545744454c544131786f7200000000000000000000000000"
    + HEAD
    + "2000000028b52ffd60b003b500006800000000000007000200010080020058809f140ab800",
    "overwrite": "545744454c5441316f766572777269746500000000000000"
    + HEAD
    + "250000000400000028b52ffd2018c100000300000028000000290000005702000004002a002800578200",
}


@codecs
def test_what_was_written_before_is_still_read(codec: Delta) -> None:
    """docs/weight-sync.md takes the first apart. A format that changes needs a new id."""
    base = tensor("w", "BF16", (600,), np.arange(600, dtype=np.uint16).tobytes())
    new = np.arange(600, dtype=np.uint16)
    new[[3, 40, 41, 599]] += np.array([1, 2, 0xFFFF, 0x8000], np.uint16)
    codec.apply(memoryview(bytes.fromhex(WRITTEN_BEFORE[codec.id])), {"w": base})
    assert bytes(base.data) == new.tobytes()
