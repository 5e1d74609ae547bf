"""Seeds of attempts and turns: the same assignment draws the same numbers, a refill other ones."""

from __future__ import annotations

import xxhash

from rollout_engine.types import AttemptId

_BITS_31 = (1 << 31) - 1


def turn_seed(seed: int, attempt: AttemptId, turn: int) -> int:
    """Derive the seed of one generation.

    Args:
        seed: Of the assignment's sampling.
        attempt: The epoch does not count: a group that is assigned again draws the same.
        turn: 0 for the first.

    Returns:
        A number of 31 bits, which every engine takes.

    """
    name = f"{seed}\0{attempt.key.group_id}\0{attempt.index}\0{attempt.try_number}\0{turn}"
    return xxhash.xxh3_64_intdigest(name.encode()) & _BITS_31


__all__ = ["turn_seed"]
