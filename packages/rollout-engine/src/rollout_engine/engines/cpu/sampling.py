"""Sampling the next token of all rows at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_engine.engines.cpu.cache import Floats
from rollout_engine.engines.cpu.noise import draw
from rollout_engine.engines.cpu.rows import Rows
from rollout_engine.engines.types import TopLogprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step sampled.

    Attributes:
        tokens: [rows].
        logprobs: [rows]; not finite where the logits are not, and then the token means nothing.
        top: For rows that asked for it.
    """

    tokens: NDArray[np.int64]
    logprobs: Floats
    top: dict[int, TopLogprobs] = field(default_factory=dict)


def sample(logits: Tensor, rows: Rows) -> Sampled:
    """Sample the next token of rows `[0, len(logits))` and advance their random numbers.

    Args:
        logits: [rows, vocab]; may be overwritten.
        rows: Says how each row is to be sampled.
    """
    count = len(logits)
    noise = torch.from_numpy(draw(rows.noise[:count]))
    if not rows.plain[:count].all():
        return _sample_special(logits, noise, rows)
    probabilities = torch.softmax(logits, -1)
    tokens = _inverse_cdf(probabilities, noise).numpy()[:, 0]
    # A token that was drawn has no vanishing probability: its logarithm is exact to 1e-7.
    return Sampled(tokens, np.log(probabilities.numpy()[rows.arange[:count], tokens]))


def _inverse_cdf(weights: Tensor, noise: Tensor) -> Tensor:
    """Return `[rows, 1]`: where the noise's share of the summed weights `[rows, n]` is reached.

    An entry of weight zero is never returned. Summed in float64: sums of float32 over a large
    vocabulary would shift the odds.
    """
    cdf = weights.cumsum(-1, dtype=torch.float64)
    places = torch.searchsorted(cdf, noise.unsqueeze(1) * cdf[:, -1:], right=True)
    return places.clamp_(max=weights.shape[1] - 1)  # n itself comes of NaN alone


def _sample_special(logits: Tensor, noise: Tensor, rows: Rows) -> Sampled:
    """Sample when some row has a temperature, a filter, a least length or wants more reported."""
    count = len(logits)
    greedy, filtered = rows.greedy[:count], rows.filtered[:count]
    for row in np.flatnonzero(rows.generated[:count] < rows.min_new[:count]).tolist():
        logits[row].masked_fill_(torch.from_numpy(rows.stops[row]), -torch.inf)
    logits.mul_(torch.from_numpy(rows.inverse_temperature[:count, None]))
    logprobs = torch.log_softmax(logits, -1)
    tokens = logprobs.argmax(-1, keepdim=True)
    if not greedy.all():
        drawn = _inverse_cdf(logprobs.exp(), noise)
        tokens = torch.where(torch.from_numpy(greedy[:, None]), tokens, drawn)
    if filtered.any():
        some = torch.from_numpy(np.flatnonzero(filtered))
        filters = torch.from_numpy(rows.filters)[some]
        tokens[some] = _draw_filtered(logprobs[some], noise[some], filters)
    chosen = tokens.numpy()[:, 0]
    result = Sampled(chosen, logprobs.numpy()[rows.arange[:count], chosen])
    for row in np.flatnonzero(rows.top_logprobs[:count]).tolist():
        result.top[row] = top_of(logprobs[row], int(rows.top_logprobs[row]))
    return result


def _draw_filtered(logprobs: Tensor, noise: Tensor, filters: Tensor) -> Tensor:
    """Draw from what top-k, top-p and min-p leave; each looks at the unfiltered probabilities.

    Args:
        logprobs: [rows, vocab], after temperature.
        noise: [rows].
        filters: [rows, 3].

    Returns:
        Tokens [rows, 1].
    """
    top_k, top_p, min_p = filters.unsqueeze(-1).unbind(1)
    probabilities, order = logprobs.double().exp().sort(-1, descending=True)
    before = probabilities.cumsum(-1) - probabilities
    keep = torch.arange(logprobs.shape[1]) < top_k
    keep &= (before <= top_p) & (probabilities >= probabilities[:, :1] * min_p)
    places = _inverse_cdf(torch.where(keep, probabilities, 0.0), noise)
    return order.gather(1, places)


def top_of(logprobs: Tensor, count: int) -> TopLogprobs:
    """Return the `count` most probable tokens of a distribution [vocab] as (logprob, token)."""
    values, tokens = logprobs.topk(min(count, len(logprobs)))
    return tuple(zip(values.tolist(), tokens.tolist(), strict=True))


__all__ = ["Sampled", "sample", "top_of"]
