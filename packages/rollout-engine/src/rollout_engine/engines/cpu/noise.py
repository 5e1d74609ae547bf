"""Random numbers that depend on a request's seed and the position in its output alone.

SplitMix64 used as a counter: the state at a position is a product, so any number of a seed's
sequence can be had without the ones before it, whatever else is computed in the same step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_STEP = np.uint64(_GAMMA)
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MUL_1, _MUL_2 = np.uint64(_MIX_1), np.uint64(_MIX_2)
_S30, _S27, _S15 = np.uint64(30), np.uint64(27), np.uint64(15)
_ODD = np.uint64(1)
# Odd multiples of 2^-49 are in (0, 1) and stay below 1 when float64 rounds a product with them.
_SCALE = 2.0**-49


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of the `index`-th sample of a request; the first keeps the request's own."""
    if index == 0:
        return seed & _MASK
    return _mix((seed + index * 0xD1342543DE82EF95) & _MASK)


def noise_state(seed: int, position: int) -> int:
    """Return the state from which `draw` makes the number of an output position."""
    return (_mix((seed + _GAMMA) & _MASK) + (position + 1) * _GAMMA) & _MASK


def draw(states: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number in (0, 1) for each state, and advance the states by one position."""
    bits = states ^ (states >> _S30)
    states += _STEP
    bits *= _MUL_1
    bits ^= bits >> _S27
    bits *= _MUL_2
    # The last mixing step of SplitMix64 changes low bits alone, which are dropped here.
    bits >>= _S15
    bits |= _ODD
    return bits * _SCALE


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


__all__ = ["derive_seed", "draw", "noise_state"]
