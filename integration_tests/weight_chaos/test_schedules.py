"""Random schedules over the pure state machines: nothing an engine ever says is untrue."""

from __future__ import annotations

from collections import Counter

import pytest

from integration_tests.weight_chaos.schedules import World
from integration_tests.weight_chaos.simulated import CRASHES, DAMAGES, LOADS

ACTIONS = 120


@pytest.mark.parametrize(
    "schedules", [500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_no_schedule_makes_an_engine_lie_or_holds_it_up(schedules: int) -> None:
    seen: Counter[str] = Counter()
    looks = 0
    for seed in range(schedules):
        world = World(seed)
        world.run(ACTIONS)
        assert world.checker.violations == [], f"seed {seed}"
        seen.update(world.seen)
        looks += world.checker.looks
    # Every kind of fault did happen, and what was seen of engines was a lot.
    expected = {f"crash {crash}" for crash in CRASHES} | {f"damage {d}" for d in DAMAGES}
    expected |= {f"load {outcome}" for outcome in LOADS} | {"fenced", "refused repetition"}
    expected |= {"receiver killed", "engine killed"}
    expected |= {f"prepare failed: {e}" for e in ("PayloadMissing", "ChecksumMismatch")}
    assert expected <= seen.keys()
    assert looks > schedules * ACTIONS
