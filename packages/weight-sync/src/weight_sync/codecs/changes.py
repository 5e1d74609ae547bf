"""Where two arrays of bit patterns differ."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weight_sync.codecs.base import Tensor, Words

_WINDOW = 1 << 17
"""Words compared at a time: what is found is still in the cache when it is used."""
_TAIL = _WINDOW // 8
# numpy looks for flags one by one where fewer than a tenth are set, which is slow where so many are
# set that the processor cannot guess them. Behind a tail of set flags it takes its other way.
_SLOW_FROM, _SLOW_TO = _WINDOW // 50, _WINDOW // 10
_SAMPLE_WORDS = 4096
_SAMPLE_EVERY = 64


def find_changes(
    base: Words, new: Words, most_changes: int
) -> tuple[NDArray[np.intp], Words] | None:
    """Return the places where two arrays differ, ascending, and the steps from old to new there.

    A step is the difference of the bit patterns, modulo 2 to their width. Floats keep sign and
    magnitude apart, so a step of 1 is one ulp, away from zero or towards it. Adding a step back
    gives every pattern: negative zero, NaNs, infinities and subnormals are patterns like others.

    Returns:
        None if more than `most_changes` differ.
    """
    places: list[NDArray[np.intp]] = []
    steps: list[Words] = []
    flags = np.ones(_WINDOW + _TAIL, np.bool_)
    total = 0
    for start in range(0, base.size, _WINDOW):
        old, now = base[start : start + _WINDOW], new[start : start + _WINDOW]
        differ = flags[: old.size]
        np.not_equal(old, now, out=differ)
        count = int(np.count_nonzero(differ))
        total += count
        if total > most_changes:
            return None
        if old.size == _WINDOW and _SLOW_FROM < count < _SLOW_TO:
            at = np.flatnonzero(flags)[:count]
        else:
            at = np.flatnonzero(differ)
        steps.append(now[at] - old[at])
        at += start
        places.append(at)
    if not total:
        return np.empty(0, np.intp), base[:0]
    return np.concatenate(places), np.concatenate(steps)


def sampled_share(tensors: Sequence[Tensor], base: Sequence[Tensor]) -> float:
    """Estimate the share of elements that changed, from one in 64 of large tensors' elements.

    Args:
        tensors: the new version.
        base: the same tensors of the old one, in the same order.
    """
    looked = differ = 0
    for tensor, old in zip(tensors, base, strict=True):
        new_words, old_words = tensor.words(), old.words()
        every = _SAMPLE_EVERY if new_words.size > _SAMPLE_EVERY * _SAMPLE_WORDS else 1
        for start in range(0, new_words.size, every * _SAMPLE_WORDS):
            part = slice(start, start + _SAMPLE_WORDS)
            differ += int(np.count_nonzero(new_words[part] != old_words[part]))
            looked += new_words[part].size
    return differ / looked if looked else 0.0
