"""Figures about an update that steer nothing by themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How far two sets of log-probabilities of the same sampled tokens are apart.

    Attributes:
        tokens: How many were compared.
        kl: k3 estimate of KL(sampled || scored) over the tokens.
        mean_abs: Mean absolute difference of the log-probabilities.
        max_abs: Largest absolute difference.
    """

    tokens: int = 0
    kl: float = 0.0
    mean_abs: float = 0.0
    max_abs: float = 0.0

    def merged(self, other: Mismatch) -> Mismatch:
        """Return the figures of both sets of tokens together."""
        tokens = self.tokens + other.tokens
        if not tokens:
            return self
        share = other.tokens / tokens
        return Mismatch(
            tokens=tokens,
            kl=self.kl + share * (other.kl - self.kl),
            mean_abs=self.mean_abs + share * (other.mean_abs - self.mean_abs),
            max_abs=max(self.max_abs, other.max_abs),
        )


def mismatch(sampled: Tensor, scored: Tensor) -> Mismatch:
    """Compare log-probabilities as an engine sampled them with a trainer's score.

    Args:
        sampled: float [tokens].
        scored: float [tokens].
    """
    if not sampled.numel():
        return Mismatch()
    with torch.no_grad():
        difference = (scored - sampled).double()
        kl = torch.expm1(difference) - difference
        return Mismatch(
            tokens=sampled.numel(),
            kl=float(kl.mean()),
            mean_abs=float(difference.abs().mean()),
            max_abs=float(difference.abs().max()),
        )


def effective_sample_size(weights: Tensor) -> float:
    """Return the share of tokens that importance weights leave in effect, from 0 to 1."""
    total = weights.sum()
    squares = weights.square().sum() * max(1, weights.numel())
    return float(total.square() / squares) if squares > 0 else 0.0
