"""The payload file of a delta: blocks of changes, each in one tensor or in several small ones.

All little-endian:

    8 bytes  "TWDELTA1"
    16       the codec's id in ASCII, zeros behind it
    16       xxh3-128 over the names, dtypes and shapes of the tensors that it is for
    u32      bytes of the frame that follows
    u32      bytes of the names; 0: it is for all tensors of the model, and there is no frame
    frame    zstd: the names in the order of the blocks, a line feed between
    blocks   each a head and a body, ascending
    u8       0: the end

A block's head:

    u8   kind    1: its body is the codec's; 2: its body is the new bytes themselves
    u32  first   the tensor it begins with
    u32  count   how many tensors; above 1: whole ones of one dtype, end to end
    u64  start   byte of the first tensor that it begins at
    u32  length  bytes that it is about
    u32  size    bytes of the body

What no block is about has not changed. Tensors go by dtype, those under 1 MiB first, then by name;
empty ones are left out. Small ones share blocks, so that what a block costs by itself hardly counts
for them; large ones are cut, so that memory is bounded and several threads can work on one.
"""

import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from weight_sync.codecs.base import Coder, Piece, Tensor, Words
from weight_sync.codecs.frames import compress, decompress
from weight_sync.core.manifest import DTYPE_BYTES, layout_of
from weight_sync.errors import PayloadCorrupt

DENSE_ABOVE = 0.3
"""Share of changed elements above which a block goes out whole; docs/weight-sync.md derives it."""
BLOCK_BYTES = 8 << 20
SMALL_BYTES = 1 << 20
"""Tensors below this share blocks. A part of the format: they come first."""

_MAGIC = b"TWDELTA1"
_FILE = struct.Struct("<8s16s16sII")
_BLOCK = struct.Struct("<BIIQII")
_END = b"\0"
_CODED, _WHOLE = 1, 2
_MAX_NAMES_BYTES = 100_000_000
_JOINED = 4
"""A block that tensors share has at most so many times `SMALL_BYTES`."""
_AHEAD = 16
"""Blocks coded before the first of them is taken."""

_room = threading.local()
"""Each thread's memory for tensors joined into a block."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Span:
    """What a block is about: `length` bytes of tensors end to end."""

    first: int
    count: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class _Block:
    """A block as it stands in a file."""

    kind: int
    span: _Span
    body: memoryview


class Delta:
    """Turns what changed between two versions into a file, and changes the older one by it.

    Both directions stream: they need little more memory than a block for each thread at work.
    """

    payload_name = "delta.bin"

    def __init__(self, coder: Coder, *, dense_above: float = DENSE_ABOVE) -> None:
        """Use a coder.

        Args:
            coder: writes down the changes of a block.
            dense_above: share of changed elements above which a block goes out whole. Decoding
                needs no such word.
        """
        self._coder = coder
        self._dense_above = dense_above

    @property
    def id(self) -> str:
        """The coder's: the codec's name in manifests."""
        return self._coder.id

    def encode(
        self,
        tensors: Sequence[Tensor],
        base: Sequence[Tensor],
        pool: Executor | None = None,
        *,
        part: bool = False,
    ) -> Iterator[Piece]:
        """Yield the payload file's bytes, piece by piece, in order.

        Args:
            tensors: the new version.
            base: the base; tensors of the same names, dtypes and shapes must be among them.
            pool: threads to work on; None: the caller's. The bytes are the same.
            part: `tensors` are not all of the model's; other payload files hold the others.

        Raises:
            ValueError: the base lacks a tensor, or has it in another layout.
        """
        new = _in_block_order(tensors)
        old = _same_layout(new, {tensor.name: tensor for tensor in base})
        names = "\n".join(tensor.name for tensor in new).encode() if part else b""
        frame = compress(names) if names else b""
        yield _FILE.pack(_MAGIC, self.id.encode(), _layout(new), len(frame), len(names)) + frame
        for pieces in _in_order(pool, lambda span: self._block(new, old, span), _spans(new)):
            yield from pieces
        yield _END

    def apply(
        self, payload: memoryview, onto: Mapping[str, Tensor], pool: Executor | None = None
    ) -> set[str]:
        """Turn the base's tensors into the new version's, in their own memory.

        After an error their contents are undefined; after success they are the new version's if
        they were the base's, which only their checksums tell.

        Args:
            payload: the file.
            onto: the base's tensors by name, writable.
            pool: threads to work on; None: the caller's.

        Returns:
            The names of the tensors that were written to.

        Raises:
            PayloadCorrupt: the payload is damaged, or made for other tensors or another codec.
        """
        tensors, blocks = self._read(payload, onto)
        # No block is about another's bytes, so their order is free.
        for _ in _in_order(pool, lambda block: self._apply_block(tensors, block), blocks):
            pass
        return {
            tensors[index].name
            for block in blocks
            for index in range(block.span.first, block.span.first + block.span.count)
        }

    def _block(self, new: Sequence[Tensor], old: Sequence[Tensor], span: _Span) -> list[Piece]:
        words = _joined(new, span, "new")
        body = self._coder.encode(
            _joined(old, span, "old"), words, most_changes=int(self._dense_above * words.size)
        )
        if body == b"":
            return []
        if body is not None and len(body) < span.length:
            return [_head(_CODED, span, len(body)), body]
        whole = words.view(np.uint8).data
        # Joined, they stand in memory that the next block takes.
        return [_head(_WHOLE, span, span.length), bytes(whole) if span.count > 1 else whole]

    def _apply_block(self, tensors: Sequence[Tensor], block: _Block) -> None:
        words = _joined(tensors, block.span, "old")
        if block.kind == _WHOLE:
            words.view(np.uint8)[:] = np.frombuffer(block.body, np.uint8)
        else:
            self._coder.apply(block.body, words)
        if block.span.count > 1:
            _write_back(words, tensors, block.span)

    def _read(
        self, payload: memoryview, onto: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], list[_Block]]:
        """Check everything but the bodies; return the tensors it is for, and its blocks."""
        if payload.nbytes < _FILE.size:
            raise PayloadCorrupt(f"a delta of {payload.nbytes} bytes was cut off in its head")
        magic, codec, layout, frame_bytes, names_bytes = _FILE.unpack_from(payload)
        if magic != _MAGIC:
            raise PayloadCorrupt(f"expected a delta that begins with {_MAGIC!r}, found {magic!r}")
        if codec != self.id.encode().ljust(len(codec), b"\0"):
            raise PayloadCorrupt(f"expected a delta of codec {self.id!r}, found {codec!r}")
        at = _FILE.size + frame_bytes
        if at > payload.nbytes or names_bytes > _MAX_NAMES_BYTES:
            raise PayloadCorrupt(f"names of {frame_bytes} bytes do not fit {payload.nbytes} bytes")
        tensors = _in_block_order(onto.values())
        if names_bytes:
            tensors = _named(decompress(payload[_FILE.size : at], names_bytes).tobytes(), onto)
        if _layout(tensors) != layout:
            raise PayloadCorrupt("the delta is for tensors of other names, dtypes or shapes")
        return tensors, list(_blocks(payload, at, tensors))


def _named(names: bytes, onto: Mapping[str, Tensor]) -> list[Tensor]:
    tensors = {}
    for name in names.split(b"\n"):
        tensor = onto.get(name.decode(errors="replace"))
        if tensor is None or tensor.name in tensors:
            raise PayloadCorrupt(f"a delta names tensor {name!r}, unknown here or twice")
        tensors[tensor.name] = tensor
    return list(tensors.values())


def _blocks(payload: memoryview, at: int, tensors: Sequence[Tensor]) -> Iterator[_Block]:
    """Yield the blocks from byte `at` on, each in bounds and after the one before."""
    done = (0, 0)
    while payload[at : at + 1] != _END:
        if at + _BLOCK.size > payload.nbytes:
            raise PayloadCorrupt(f"the delta was cut off at byte {payload.nbytes}")
        kind, first, count, start, length, size = _BLOCK.unpack_from(payload, at)
        at += _BLOCK.size
        span = _Span(first, count, start, length)
        fits = kind in (_CODED, _WHOLE) and (first, start) >= done and _fits(span, tensors)
        if not fits or at + size > payload.nbytes or (kind == _WHOLE and size != length):
            raise PayloadCorrupt(
                f"a block of kind {kind} with {size} bytes about {span} does not fit a delta of "
                f"{len(tensors)} tensors and {payload.nbytes} bytes"
            )
        done = (first, start + length) if count == 1 else (first + count, 0)
        yield _Block(kind, span, payload[at : at + size])
        at += size
    if at + 1 != payload.nbytes:
        raise PayloadCorrupt(f"{payload.nbytes - at - 1} bytes follow the delta's end")


def _fits(span: _Span, tensors: Sequence[Tensor]) -> bool:
    members = tensors[span.first : span.first + span.count]
    if not members or len(members) != span.count or not span.length:
        return False
    if span.count > 1:
        one_dtype = len({tensor.dtype for tensor in members}) == 1
        whole = span.length == sum(tensor.data.nbytes for tensor in members)
        return one_dtype and span.start == 0 and whole
    word_bytes = DTYPE_BYTES[members[0].dtype]
    aligned = span.start % word_bytes == span.length % word_bytes == 0
    return aligned and span.start + span.length <= members[0].data.nbytes


def _in_block_order(tensors: Iterable[Tensor]) -> list[Tensor]:
    filled = [tensor for tensor in tensors if tensor.data.nbytes]
    return sorted(filled, key=lambda t: (t.dtype, t.data.nbytes >= SMALL_BYTES, t.name))


def _spans(tensors: Sequence[Tensor]) -> Iterator[_Span]:
    """Cut tensors in block order into what one block each is about."""
    index = 0
    while index < len(tensors):
        first, size = index, tensors[index].data.nbytes
        index += 1
        if size >= SMALL_BYTES:
            for start in range(0, size, BLOCK_BYTES):
                yield _Span(first, 1, start, min(BLOCK_BYTES, size - start))
            continue
        while index < len(tensors) and tensors[index].dtype == tensors[first].dtype:
            more = tensors[index].data.nbytes
            if more >= SMALL_BYTES or size + more > _JOINED * SMALL_BYTES:
                break
            size += more
            index += 1
        yield _Span(first, index - first, 0, size)


def _joined(tensors: Sequence[Tensor], span: _Span, slot: str) -> Words:
    """Return a span's words: a view into one tensor, or a copy of several.

    The copy is in memory of this thread's that the next copy into the same slot takes: fresh memory
    would cost more than the copy, since the kernel clears it page by page.
    """
    words = [tensor.words() for tensor in tensors[span.first : span.first + span.count]]
    if span.count > 1:
        room: NDArray[np.uint8] | None = getattr(_room, slot, None)
        if room is None or room.nbytes < span.length:
            room = np.empty(max(span.length, SMALL_BYTES), np.uint8)
            setattr(_room, slot, room)
        return np.concatenate(words, out=room[: span.length].view(words[0].dtype))
    word_bytes = words[0].itemsize
    return words[0][span.start // word_bytes : (span.start + span.length) // word_bytes]


def _write_back(words: Words, tensors: Sequence[Tensor], span: _Span) -> None:
    at = 0
    for tensor in tensors[span.first : span.first + span.count]:
        target = tensor.words()
        target[:] = words[at : at + target.size]
        at += target.size


def _same_layout(new: Sequence[Tensor], base: Mapping[str, Tensor]) -> list[Tensor]:
    old = []
    for tensor in new:
        found = base.get(tensor.name)
        if found is None or (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
            other = "no such tensor" if found is None else f"{found.dtype} {list(found.shape)}"
            raise ValueError(
                f"tensor {tensor.name}: a delta needs {tensor.dtype} {list(tensor.shape)} in its "
                f"base, found {other}. Publish an anchor"
            )
        old.append(found)
    return old


def _layout(tensors: Sequence[Tensor]) -> bytes:
    text = "\n".join(layout_of(t.name, t.dtype, t.shape) for t in tensors)
    return xxhash.xxh3_128_digest(text.encode())


def _head(kind: int, span: _Span, size: int) -> bytes:
    return _BLOCK.pack(kind, span.first, span.count, span.start, span.length, size)


def _in_order(pool: Executor | None, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield each item's result in order; a pool works at most `_AHEAD` items ahead."""
    if pool is None:
        yield from map(work, items)
        return
    begun: deque[Future[R]] = deque()
    try:
        for item in items:
            begun.append(pool.submit(work, item))
            if len(begun) > _AHEAD:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        for future in begun:
            future.cancel()
