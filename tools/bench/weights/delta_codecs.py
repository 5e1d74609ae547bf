"""Bytes and CPU time of ways to send what changed between two versions, on the same tensors."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from bench.weights.bf16 import Bits, Synthetic, tensors_of
from bench.weights.checkpoints import checkpoints
from bench.weights.rivals import INDEX_VALUE, OVERWRITE, XOR, Model, Way, model_of, ours
from weight_sync.core.manifest import digest

PERCENTS = (0.5, 1, 3, 8, 20)
"""Of the elements, changed by an update."""
WITHIN = 8
"""Percent up to which the targets hold; the CPU ratios are the worst of those."""
LEARNING_RATES = (1e-5, 3e-6, 1e-6)
"""Of the training run; the first one's figure is `bytes_ratio_real`."""
OURS = ours("ulp-gap")
WAYS = (OURS, XOR, OVERWRITE, INDEX_VALUE)

Figures = dict[str, list[float]]
"""Each figure's value in each round."""


@dataclass
class Measured:
    """One way on one pair of versions, round by round."""

    sent_bytes: int = 0
    encode_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)


def measure(base: Model, new: Model, ways: Sequence[Way], rounds: int) -> dict[str, Measured]:
    """Encode and decode by each way in turn, and compare the bits; CPU-seconds of this thread."""
    out = empty_like(base)
    found = {way.name: Measured() for way in ways}
    for _ in range(rounds):
        for way in ways:
            measured = found[way.name]
            began_s = time.thread_time()
            sent = way.encode(base, new)
            encoded_s = time.thread_time()
            way.decode(sent, base, out)
            measured.decode_s.append(time.thread_time() - encoded_s)
            measured.encode_s.append(encoded_s - began_s)
            measured.sent_bytes = sum(map(len, sent))
            for name, tensor in new.items():
                if out[name].data != tensor.data:
                    raise AssertionError(f"{way.name} did not give back {name}")
                out[name].words().fill(0)
    return found


def empty_like(model: Model) -> Model:
    """Return tensors with memory of their own."""
    return model_of({name: np.empty_like(tensor.words()) for name, tensor in model.items()})


def codec_figures(rounds: int, percents: Sequence[float] = PERCENTS) -> Figures:
    """Measure all ways on synthetic weights and on a training run's; print a table of each."""
    figures: Figures = {}
    encode_ratios: list[list[float]] = []
    decode_ratios: list[list[float]] = []
    synthetic = Synthetic(seed=0)
    base = model_of(tensors_of(synthetic.base))
    _print_common(base, rounds)
    for percent in percents:
        new = synthetic.after(percent / 100)
        changed = np.count_nonzero(new != synthetic.base) / new.size
        found = measure(base, model_of(tensors_of(new)), WAYS, rounds)
        _print(f"synthetic, {changed:.2%} changed", found, synthetic.base.nbytes)
        _print_floors(synthetic.base, new)
        own, rival = found[OURS.name], found[XOR.name]
        figures[f"bytes_ratio_{percent:g}"] = [own.sent_bytes / rival.sent_bytes]
        if percent <= WITHIN:
            encode_ratios.append(_ratios(own.encode_s, rival.encode_s))
            decode_ratios.append(_ratios(own.decode_s, rival.decode_s))
    if encode_ratios:
        figures["encode_cpu_ratio"] = max(encode_ratios, key=statistics.median)
        figures["decode_cpu_ratio"] = max(decode_ratios, key=statistics.median)
    for rate in LEARNING_RATES:
        name = "bytes_ratio_real" if rate == LEARNING_RATES[0] else f"bytes_ratio_real_{rate:g}"
        figures[name] = _real(rate, rounds)
    return figures


def _real(learning_rate: float, rounds: int) -> list[float]:
    """Return the ratio of bytes for each pair of consecutive checkpoints."""
    ratios = []
    for kind, kept in zip(("SFT", "GRPO"), checkpoints(learning_rate), strict=True):
        for base, new in itertools.pairwise(kept):
            found = measure(model_of(base), model_of(new), WAYS, rounds)
            ratios.append(found[OURS.name].sent_bytes / found[XOR.name].sent_bytes)
        size = sum(bits.size for bits in new.values())
        changed = sum(int(np.count_nonzero(new[n] != base[n])) for n in new) / size
        _print(f"{kind} at {learning_rate:g}, {changed:.2%} changed", found, 2 * size)
    return ratios


def _ratios(ours: Sequence[float], rival: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ours, rival, strict=True)]


def _print_floors(base: Bits, new: Bits) -> None:
    """Print what places and steps of changes cost at least, if one tells nothing of another."""
    known = {"independent": np.zeros(base.size, np.uint8), "given exponent": base >> 7 & 0xFF}
    for name, group in known.items():
        bits = 0.0
        for value in np.unique(group):
            chosen = group == value
            steps = (new[chosen] - base[chosen])[new[chosen] != base[chosen]]
            still = int(chosen.sum()) - steps.size
            bits += _entropy_bits([steps.size, still])
            bits += _entropy_bits(np.unique(steps, return_counts=True)[1].tolist())
        print(f"{name:18}{bits / 8:>10.0f}{bits / 8 / base.nbytes:>10.3%}  (entropy)")


def _entropy_bits(counts: Sequence[int]) -> float:
    """Return the entropy of as many draws as there are counts in all, in bits."""
    seen = np.array([count for count in counts if count], np.float64)
    return float((seen * np.log2(seen.sum() / seen)).sum())


def _print_common(model: Model, rounds: int) -> None:
    """Print what every way costs beside: a copy of the model, and its tensors' checksums."""
    copy = empty_like(model)
    took_s: dict[str, list[float]] = {"copying": [], "hashing": []}
    for _ in range(rounds):
        began_s = time.thread_time()
        for name, tensor in model.items():
            np.copyto(copy[name].words(), tensor.words())
        copied_s = time.thread_time()
        for tensor in model.values():
            digest(tensor.data)
        took_s["hashing"].append(time.thread_time() - copied_s)
        took_s["copying"].append(copied_s - began_s)
    gigabytes = sum(tensor.data.nbytes for tensor in model.values()) / 1e9
    for name, times in took_s.items():
        print(f"{name} the model: {statistics.median(times) / gigabytes:.3f} CPU-s/GB")


def _print(title: str, found: dict[str, Measured], model_bytes: int) -> None:
    print(f"\n{title}\n{'':18}{'bytes':>10}{'of model':>10}{'encode':>10}{'decode':>10}  CPU-s/GB")
    for name, way in found.items():
        encode_s, decode_s = (
            statistics.median(times) / model_bytes * 1e9 for times in (way.encode_s, way.decode_s)
        )
        share = way.sent_bytes / model_bytes
        print(f"{name:18}{way.sent_bytes:>10}{share:>10.3%}{encode_s:>10.3f}{decode_s:>10.3f}")
