"""Group-relative advantages: how much better an attempt did than its siblings."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_trainer.core.objective import AdvantageKind


def group_advantages(
    rewards: Tensor,
    group: Tensor,
    valid: Tensor,
    *,
    kind: AdvantageKind = AdvantageKind.STD,
    epsilon: float = 1e-6,
) -> Tensor:
    """Turn rewards into advantages within each group.

    Attempts that are not valid get 0 and take no part in mean and deviation. So do those of groups
    with fewer than two valid attempts.

    Args:
        rewards: float [attempts].
        group: int64 [attempts], from 0; which group each attempt belongs to.
        valid: bool [attempts].
        kind: What is subtracted and divided by. The deviation is that of the population.
        epsilon: Added to the deviation.

    Returns:
        float [attempts].
    """
    groups = int(group.max()) + 1 if group.numel() else 0
    kept = valid.to(rewards.dtype)
    # A reward of an invalid attempt may be anything, not a number included.
    reward = torch.where(valid, rewards, torch.zeros_like(rewards))
    count = rewards.new_zeros(groups).index_add(0, group, kept)
    mean = rewards.new_zeros(groups).index_add(0, group, reward) / count.clamp(min=1)
    centred = (reward - mean[group]) * kept
    if kind is AdvantageKind.STD:
        variance = rewards.new_zeros(groups).index_add(0, group, centred.square())
        deviation = (variance / count.clamp(min=1)).sqrt()
        centred = centred / (deviation[group] + epsilon)
    elif kind is AdvantageKind.LEAVE_ONE_OUT:
        centred = centred * (count / (count - 1).clamp(min=1))[group]
    return torch.where(count[group] >= 2, centred, torch.zeros_like(centred))
