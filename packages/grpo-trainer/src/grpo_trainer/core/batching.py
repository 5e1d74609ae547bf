"""Which tokens are computed together: minibatches of an update, micro-batches of a pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def micro_batches(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Split sequences into micro-batches of at most `max_tokens` tokens each.

    Neighbours in length go together, so that padding inside attention stays small, and the bound
    is lowered as far as the number of micro-batches allows, so that they are even. A sequence that
    is longer than the bound makes a micro-batch of its own.

    Args:
        lengths: Tokens of each sequence.
        max_tokens: Bound on the tokens of one micro-batch.

    Returns:
        Indices into `lengths`; each occurs once, shortest sequences first.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, found {max_tokens}")
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    if not order:
        return []
    fewest = len(_fill(order, lengths, max_tokens))
    # The least bound that needs no more micro-batches is the most even one.
    low, high = 1, max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_fill(order, lengths, middle)) <= fewest:
            high = middle
        else:
            low = middle + 1
    return _fill(order, lengths, high)


def _fill(order: Sequence[int], lengths: Sequence[int], bound: int) -> list[list[int]]:
    batches: list[list[int]] = []
    tokens = 0
    for index in order:
        if not batches or tokens + lengths[index] > bound:
            batches.append([])
            tokens = 0
        batches[-1].append(index)
        tokens += lengths[index]
    return batches


def minibatches(count: int, parts: int, generator: np.random.Generator) -> list[list[int]]:
    """Split `count` items at random into at most `parts` minibatches of even size.

    Returns:
        Indices in ascending order within each minibatch; none is empty.
    """
    if parts < 1:
        raise ValueError(f"parts must be at least 1, found {parts}")
    shuffled = generator.permutation(count)
    return [
        sorted(int(index) for index in shuffled[part::parts]) for part in range(min(parts, count))
    ]


def length_buckets(
    lengths: Sequence[int],
    *,
    batch_size: int,
    window: int,
    generator: np.random.Generator,
) -> list[list[int]]:
    """Order one pass over a data set as batches of similar length, at random.

    The items are shuffled; each run of `window` batches is sorted by length, cut into batches, and
    the batches shuffled again. The last batch may be smaller.

    Args:
        lengths: Tokens of each item.
        batch_size: Items of a batch.
        window: Batches that are sorted together; 1 means no bucketing.
        generator: Source of the order.
    """
    shuffled = [int(index) for index in generator.permutation(len(lengths))]
    batches: list[list[int]] = []
    for start in range(0, len(shuffled), batch_size * window):
        block = sorted(
            shuffled[start : start + batch_size * window], key=lambda index: lengths[index]
        )
        cut = [block[at : at + batch_size] for at in range(0, len(block), batch_size)]
        batches.extend(cut[int(index)] for index in generator.permutation(len(cut)))
    return batches
