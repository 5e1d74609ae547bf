"""Names and constants of generated repositories, and which split owns each of them.

Nouns are pairs of syllables from a closed alphabet, so that a small model can copy a name it has
never seen. A stable hash gives every noun, repository name and constant to exactly one split.
"""

from __future__ import annotations

import random
import zlib
from enum import StrEnum

__all__ = ["CONSTANTS", "SYLLABLES", "Split", "draw_noun", "draw_repository_name", "split_of_name"]


class Split(StrEnum):
    """A part of the generated world. No two share a repository, a function name or a bug."""

    PRETRAIN = "pretrain"
    TRAIN = "train"
    HELDOUT = "heldout"


SYLLABLES: tuple[str, ...] = tuple(
    consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeio"
)
"""The closed alphabet of nouns, in a fixed order."""

_BUCKETS = (
    Split.HELDOUT,
    Split.HELDOUT,
    Split.PRETRAIN,
    Split.PRETRAIN,
    Split.PRETRAIN,
    Split.PRETRAIN,
    Split.TRAIN,
    Split.TRAIN,
    Split.TRAIN,
    Split.TRAIN,
)

_CONSTANT_OWNERS = (Split.TRAIN, Split.PRETRAIN, Split.TRAIN, Split.HELDOUT, Split.PRETRAIN)

CONSTANTS: dict[Split, tuple[int, ...]] = {
    split: tuple(n for n in range(11, 99) if _CONSTANT_OWNERS[n % 5] is split) for split in Split
}
"""Two-digit numbers that a split's functions may contain as constants."""


def split_of_name(name: str) -> Split:
    """The one split that may use `name` as a noun or as a repository name."""
    return _BUCKETS[zlib.crc32(name.encode()) % len(_BUCKETS)]


def _draw(rng: random.Random, split: Split, syllables: int) -> str:
    while True:
        name = "".join(rng.choice(SYLLABLES) for _ in range(syllables))
        if split_of_name(name) is split:
            return name


def draw_noun(rng: random.Random, split: Split) -> str:
    """A two-syllable noun that belongs to `split`."""
    return _draw(rng, split, 2)


def draw_repository_name(rng: random.Random, split: Split) -> str:
    """A three-syllable repository name that belongs to `split`."""
    return _draw(rng, split, 3)
