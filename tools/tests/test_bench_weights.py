"""tools/bench/weight_sync.py compares what it says it compares."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.weights import bf16, checkpoints, delta_codecs, rivals


def test_every_way_gives_the_new_bits_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "PIECE", 1000)
    rng = np.random.default_rng(0)
    base = {
        name: rng.integers(0, 1 << 16, size, np.uint16) for name, size in (("a", 2500), ("b", 9))
    }
    new = {
        name: bits + (rng.random(bits.size) < 0.1).astype(np.uint16) for name, bits in base.items()
    }
    models = (rivals.model_of(base), rivals.model_of(new))
    found = delta_codecs.measure(*models, delta_codecs.WAYS, rounds=1)
    assert list(found) == ["ulp-gap", "xor+zstd-1", "overwrite+zstd-1", "index+value"]
    changed = sum(int(np.count_nonzero(new[name] != base[name])) for name in base)
    assert found["index+value"].sent_bytes == 6 * changed


def test_a_way_that_loses_a_bit_is_caught() -> None:
    lossy = rivals.Way("lossy", rivals.XOR.encode, lambda sent, base, out: None)
    ones = rivals.model_of({"a": np.ones(10, np.uint16)})
    with pytest.raises(AssertionError, match="lossy did not give back a"):
        delta_codecs.measure(ones, ones, [lossy], rounds=1)


def test_casts_are_those_of_torch() -> None:
    values = np.random.default_rng(0).standard_normal(4096, np.float32)
    values[:4] = [1.00390625, 1.01171875, 0.0, -0.0]  # ties, zeros
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(bf16.to_bf16(values), expected)


def test_so_much_changes_as_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16, "SHAPES", {"a": (400, 500)})
    synthetic = bf16.Synthetic(seed=0)
    for share in (0.005, 0.08):
        assert np.mean(synthetic.after(share) != synthetic.base) == pytest.approx(share, rel=0.05)


def test_checkpoints_are_steps_apart_and_few_of_their_weights_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoints, "STEPS", 3)
    monkeypatch.setattr(checkpoints, "KEPT", 2)
    for kept in checkpoints.checkpoints(1e-6):
        assert len(kept) == 2
        for base, new in itertools.pairwise(kept):
            size = sum(bits.size for bits in new.values())
            changed = sum(np.count_nonzero(new[name] != base[name]) for name in new)
            assert 0 < changed < 0.1 * size
