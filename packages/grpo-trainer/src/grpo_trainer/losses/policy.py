"""The clipped policy-gradient loss and its relatives, one value a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_trainer.core.objective import RatioKind
from grpo_trainer.losses.ratios import sequence_log_ratio


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """Per-token results.

    Attributes:
        loss: float [tokens], with gradient.
        ratio: float [tokens], what was clipped; no gradient.
        clipped_low: bool [tokens], the lower clip decided the value.
        clipped_high: bool [tokens], the upper clip decided the value.
        clipped_dual: bool [tokens], the dual clip decided the value.
    """

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor


def policy_loss(
    current: Tensor,
    proximal: Tensor,
    advantage: Tensor,
    attempt: Tensor,
    attempts: int,
    *,
    kind: RatioKind = RatioKind.TOKEN,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> PolicyTerms:
    """Return the loss of each token, to be weighed and summed.

    Token and sequence ratios: `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`. With a dual clip
    `c` the objective of a negative advantage is at least `c A`, so that a token which has become
    much likelier cannot dominate. CISPO: `-stop(clip(r)) A log p`.

    Args:
        current: float [tokens], log-probabilities with gradient.
        proximal: float [tokens], log-probabilities under the weights at the start of the step.
        advantage: float [tokens].
        attempt: int64 [tokens].
        attempts: How many attempts there are.
        kind: What is clipped.
        clip_low: How far below 1 the ratio counts.
        clip_high: How far above 1 the ratio counts.
        dual_clip: Bound for negative advantages, above 1; None: none.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be above 1, found {dual_clip}")
    log_ratio = current - proximal
    if kind is RatioKind.SEQUENCE:
        log_ratio = sequence_log_ratio(log_ratio, attempt, attempts)
    ratio = log_ratio.exp()
    low, high = 1 - clip_low, 1 + clip_high
    if kind is RatioKind.CISPO:
        weight = ratio.detach().clamp(low, high)
        nowhere = torch.zeros_like(advantage, dtype=torch.bool)
        return PolicyTerms(
            loss=-weight * advantage * current,
            ratio=ratio.detach(),
            clipped_low=ratio < low,
            clipped_high=ratio > high,
            clipped_dual=nowhere,
        )
    objective = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    negative = advantage < 0
    clipped_dual = torch.zeros_like(negative)
    if dual_clip is not None:
        floor = dual_clip * advantage
        clipped_dual = negative & (objective < floor)
        objective = torch.where(negative, torch.maximum(objective, floor), objective)
    return PolicyTerms(
        loss=-objective,
        ratio=ratio.detach(),
        clipped_low=negative & (ratio < low),
        clipped_high=(advantage > 0) & (ratio > high),
        clipped_dual=clipped_dual,
    )


def kl_to_reference(current: Tensor, reference: Tensor) -> Tensor:
    """Return the k3 estimate of KL(current || reference) of each sampled token, never negative.

    Args:
        current: float [tokens], log-probabilities with gradient.
        reference: float [tokens], log-probabilities of the reference policy.
    """
    difference = reference - current
    return torch.expm1(difference) - difference
