"""From per-token losses to one number: what a token of an attempt weighs."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_trainer.core.objective import Aggregation


def attempt_weights(
    tokens: Tensor,
    kind: Aggregation = Aggregation.TOKEN_MEAN,
    *,
    fixed_length: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return what each token of an attempt weighs, so that the loss is a plain weighted sum.

    The loss of a minibatch is `(per_token * weights[attempt]).sum()`, and since the weights are
    those of the whole minibatch, its micro-batches may be summed one by one.

    Args:
        tokens: int64 [attempts], trained tokens of each attempt in the minibatch.
        kind: What is averaged over.
        fixed_length: The constant for `FIXED_LENGTH`, in tokens.
        dtype: Of the result; None: torch's default.

    Returns:
        float [attempts]; 0 for attempts without tokens.
    """
    counts = tokens.to(dtype or torch.get_default_dtype())
    present = (counts > 0).to(counts.dtype)
    if kind is Aggregation.TOKEN_MEAN:
        return present / counts.sum().clamp(min=1)
    attempts = present.sum().clamp(min=1)
    if kind is Aggregation.SEQUENCE_MEAN:
        return present / (counts.clamp(min=1) * attempts)
    if fixed_length < 1:
        raise ValueError(f"FIXED_LENGTH needs fixed_length of at least 1, found {fixed_length}")
    return present / (attempts * fixed_length)
