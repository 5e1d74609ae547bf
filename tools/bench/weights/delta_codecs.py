"""Bytes and CPU time of ways to send what changed between two versions, on the same tensors."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
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
LEARNING_RATE = 1e-5
"""Of the training run; its figures are the ones that end in `_real`."""
LOWER_RATES = (3e-6, 1e-6)
LONGER = 20
"""Steps more of either kind of training at `LEARNING_RATE`, so that there are more to measure."""
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
    pairs = _consecutive(LEARNING_RATE, LONGER)
    figures["bytes_ratio_real"] = _bytes_ratios(pairs)
    bases, news = _joined(base for base, _ in pairs), _joined(new for _, new in pairs)
    found = measure(bases, news, WAYS, rounds)
    size = sum(tensor.data.nbytes for tensor in news.values())
    _print(f"{len(pairs)} steps at {LEARNING_RATE:g} side by side", found, size)
    own, rival = found[OURS.name], found[XOR.name]
    figures["encode_cpu_ratio_real"] = _ratios(own.encode_s, rival.encode_s)
    figures["decode_cpu_ratio_real"] = _ratios(own.decode_s, rival.decode_s)
    for name, measured in (("encode", encode_ratios), ("decode", decode_ratios)):
        measured.append(figures[f"{name}_cpu_ratio_real"])
        figures[f"{name}_cpu_ratio"] = max(measured, key=statistics.median)
    for rate in LOWER_RATES:
        figures[f"bytes_ratio_real_{rate:g}"] = _bytes_ratios(_consecutive(rate, 0))
    return figures


Pair = tuple[dict[str, Bits], dict[str, Bits]]


def _consecutive(learning_rate: float, longer: int) -> list[Pair]:
    """Train, and return the weights before and after each of the last steps of SFT and of GRPO."""
    pairs: list[Pair] = []
    for kind, series in zip(
        ("SFT", "GRPO"), checkpoints(learning_rate, longer=longer), strict=True
    ):
        steps = list(itertools.pairwise(series))
        changed = [np.mean(np.concatenate([b[n] != a[n] for n in a])) for a, b in steps]
        print(
            f"\n{kind} at {learning_rate:g}: {len(steps)} steps, changed "
            f"{statistics.median(changed):.2%} ({min(changed):.2%} to {max(changed):.2%})"
        )
        pairs += steps
    return pairs


def _bytes_ratios(pairs: Sequence[Pair]) -> list[float]:
    """Return ours to XOR's bytes for each step, sent as a version of its own."""
    ratios = []
    for base, new in pairs:
        found = measure(model_of(base), model_of(new), (OURS, XOR), 1)
        ratios.append(found[OURS.name].sent_bytes / found[XOR.name].sent_bytes)
    return ratios


def _joined(models: Iterable[dict[str, Bits]]) -> Model:
    """Put the weights of several steps side by side, as one model of the same tensors many times.

    One version of this model takes a millisecond, of which much is what any file costs. The tensors
    stay as small as they are, and the changes those of real steps.
    """
    return model_of({f"{at}.{n}": b for at, model in enumerate(models) for n, b in model.items()})


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
