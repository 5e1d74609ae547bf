"""Weights as a trainer publishes them: bf16 casts of fp32 masters, before and after an update."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bits = NDArray[np.uint16]

SHAPES: dict[str, tuple[int, ...]] = {"embed": (8192, 1024)} | {
    f"layer.{layer}.{name}": shape
    for layer in range(2)
    for name, shape in {
        "q": (1024, 1024),
        "k": (512, 1024),
        "v": (512, 1024),
        "o": (1024, 1024),
        "gate": (3072, 1024),
        "up": (3072, 1024),
        "down": (1024, 3072),
        "norm": (1024,),
    }.items()
}
"""A small transformer's matrices, of the sizes that larger ones are cut into; 66 MB in bf16."""

_SPREAD = 0.02
_SAMPLE = 1 << 20


def to_bf16(values: Floats) -> Bits:
    """Round to the nearest bf16, ties to even, and return its bits."""
    bits = values.view(np.uint32)
    rounded: NDArray[Any] = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    return rounded.astype(np.uint16)


class Synthetic:
    """Gaussian fp32 masters and one Adam-like update, whose rate decides how much changes."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        size = sum(int(np.prod(shape)) for shape in SHAPES.values())
        self._masters = rng.standard_normal(size, np.float32) * np.float32(_SPREAD)
        # What Adam divides by is as large as what it divides: m / sqrt(v) has one scale for all.
        self._update = rng.standard_normal(size, np.float32)
        self.base = to_bf16(self._masters)

    def after(self, share: float) -> Bits:
        """Return the weights after an update at the rate that changes such a share of them."""
        sample = slice(0, _SAMPLE)
        low, high = 1e-9, 1.0
        for _ in range(40):
            rate = (low * high) ** 0.5
            changed = np.mean(self._moved(sample, rate) != self.base[sample])
            low, high = (rate, high) if changed < share else (low, rate)
        return self._moved(slice(None), high)

    def _moved(self, part: slice, rate: float) -> Bits:
        return to_bf16(self._masters[part] + np.float32(rate) * self._update[part])


def tensors_of(flat: Bits) -> dict[str, Bits]:
    """Cut a flat array into the tensors of `SHAPES`, as views."""
    tensors = {}
    at = 0
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        tensors[name] = flat[at : at + size]
        at += size
    return tensors
