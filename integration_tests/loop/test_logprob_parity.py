"""Engine and trainer score an agent's tokens the same: decode steps against one pass.

Both are told as float32. Computed in float64 they can differ in its last bit, which is 1e-6 for
values between -16 and -8; computed in float32 they are good for about 1e-6 here, and for 3e-5 on
the worst token of some thousands.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from bench.logprob_parity import Dtype, measure

TASKS = 40


@pytest.mark.parametrize(
    ("dtype", "usual", "worst"), [("float64", 2e-6, 2e-6), ("float32", 1e-5, 5e-5)]
)
def test_log_probabilities_are_the_trainers(dtype: Dtype, usual: float, worst: float) -> None:
    found = measure(dtype, range(TASKS))
    assert len(found.differences) > 1500
    assert found.reused_tokens > 50 * TASKS, "second turns go on from the prefix cache"
    assert np.quantile(found.differences, 0.995) < usual
    assert found.differences.max() < worst
