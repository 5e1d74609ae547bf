"""Importance ratios: the policy trained now, the proximal one, and the one that sampled.

Three policies meet in an update. The *behaviour* policy sampled the tokens (perhaps older weights,
in an engine with other kernels), the *proximal* policy is the weights at the start of the step, the
*current* policy is what the optimizer changes. The clipped ratio is current over proximal; how far
the proximal policy has moved from behaviour is corrected by a weight that takes no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_trainer.core.objective import CorrectionMask, CorrectionWeight


def sum_by_attempt(values: Tensor, attempt: Tensor, attempts: int) -> Tensor:
    """Sum `values` [tokens] by attempt: [attempts]."""
    return values.new_zeros(attempts).index_add(0, attempt, values)


def sequence_log_ratio(log_ratio: Tensor, attempt: Tensor, attempts: int) -> Tensor:
    """Return the mean log-ratio of each token's attempt (GSPO), with gradient.

    Args:
        log_ratio: float [tokens], current minus proximal log-probabilities.
        attempt: int64 [tokens].
        attempts: How many attempts there are.

    Returns:
        float [tokens], equal within an attempt.
    """
    counts = sum_by_attempt(torch.ones_like(log_ratio), attempt, attempts).clamp(min=1)
    return (sum_by_attempt(log_ratio, attempt, attempts) / counts)[attempt]


def behaviour_correction(
    proximal: Tensor,
    behaviour: Tensor,
    attempt: Tensor,
    attempts: int,
    *,
    weight: CorrectionWeight = CorrectionWeight.NONE,
    cap: float = 2.0,
    mask: CorrectionMask = CorrectionMask.NONE,
    mask_low: float = 0.5,
    mask_high: float = 5.0,
) -> Tensor:
    """Return what each token's loss is multiplied by; no gradient flows through it.

    Args:
        proximal: float [tokens], log-probabilities under the weights at the start of the step.
        behaviour: float [tokens], log-probabilities as sampled.
        attempt: int64 [tokens].
        attempts: How many attempts there are.
        weight: Level of the importance weight.
        cap: Truncates the weight from above.
        mask: Level at which tokens are left out.
        mask_low: Lower end of the band that stays.
        mask_high: Upper end of the band that stays.

    Returns:
        float [tokens], 0 where masked.
    """
    with torch.no_grad():
        log_ratio = proximal.detach() - behaviour
        total = sum_by_attempt(log_ratio, attempt, attempts)[attempt]
        if weight is CorrectionWeight.NONE:
            factor = torch.ones_like(log_ratio)
        elif weight is CorrectionWeight.TOKEN:
            factor = log_ratio.exp().clamp(max=cap)
        else:
            factor = total.exp().clamp(max=cap)
        if mask is CorrectionMask.NONE:
            return factor
        if mask is CorrectionMask.TOKEN:
            judged = log_ratio.exp()
        elif mask is CorrectionMask.SEQUENCE:
            judged = total.exp()
        else:
            judged = sequence_log_ratio(log_ratio, attempt, attempts).exp()
        kept = (judged >= mask_low) & (judged <= mask_high)
        return torch.where(kept, factor, torch.zeros_like(factor))
