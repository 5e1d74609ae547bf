"""How the learning rate moves over a stage."""

from __future__ import annotations

from typing import Literal


def rate_scale(
    step: int,
    progress: float,
    *,
    warmup_steps: int,
    decay: Literal["linear", "constant"],
    floor: float,
) -> float:
    """Return what the peak rate is multiplied by.

    Args:
        step: Steps done before this one.
        progress: How far the stage is, from 0 to 1: by steps, or by time if that is further.
        warmup_steps: Steps of the linear rise; step 0 has the first share of it.
        decay: What follows.
        floor: Where the linear decay ends.
    """
    warm = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    if decay == "constant":
        return warm
    return warm * max(floor, 1.0 - progress)
