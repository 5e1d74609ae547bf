"""Losses as pure functions of tensors. They need the extra `torch`.

Tensors are flat: one entry a sampled token, `[tokens]`, with the attempt that each belongs to as an
index, `[tokens]`. So nothing is padded, and a batch may be cut into micro-batches anywhere between
attempts without changing the result.
"""

from grpo_trainer.core.objective import (
    AdvantageKind,
    Aggregation,
    CorrectionMask,
    CorrectionWeight,
    RatioKind,
)
from grpo_trainer.losses.advantages import group_advantages
from grpo_trainer.losses.aggregate import attempt_weights
from grpo_trainer.losses.logprob import token_logprobs
from grpo_trainer.losses.metrics import Mismatch, effective_sample_size, mismatch
from grpo_trainer.losses.policy import PolicyTerms, kl_to_reference, policy_loss
from grpo_trainer.losses.ratios import behaviour_correction, sequence_log_ratio

__all__ = [
    "AdvantageKind",
    "Aggregation",
    "CorrectionMask",
    "CorrectionWeight",
    "Mismatch",
    "PolicyTerms",
    "RatioKind",
    "attempt_weights",
    "behaviour_correction",
    "effective_sample_size",
    "group_advantages",
    "kl_to_reference",
    "mismatch",
    "policy_loss",
    "sequence_log_ratio",
    "token_logprobs",
]
