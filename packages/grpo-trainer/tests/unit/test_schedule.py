from __future__ import annotations

import pytest
from grpo_trainer.core.schedule import rate_scale


def scales(decay: str, steps: int = 10, warmup: int = 4, floor: float = 0.2) -> list[float]:
    return [
        rate_scale(step, step / steps, warmup_steps=warmup, decay=decay, floor=floor)  # type: ignore[arg-type]
        for step in range(steps)
    ]


def test_rises_over_the_warmup_and_falls_to_the_floor() -> None:
    found = scales("linear")
    assert found[:4] == pytest.approx([0.25, 0.5 * 0.9, 0.75 * 0.8, 0.7])
    assert found[8:] == pytest.approx([0.2, 0.2])


def test_constant_stays_at_the_peak() -> None:
    assert scales("constant")[4:] == [1.0] * 6


def test_without_warmup_it_begins_at_the_peak() -> None:
    assert rate_scale(0, 0.0, warmup_steps=0, decay="linear", floor=0.0) == 1.0
