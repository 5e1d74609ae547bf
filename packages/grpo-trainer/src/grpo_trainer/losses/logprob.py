"""Log-probabilities and entropies of given tokens, without the matrix [tokens, vocabulary].

The logits of a chunk of tokens are made, used and dropped, and made again in the backward pass.
Peak memory is one chunk times the vocabulary, whatever the number of tokens.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Score target tokens under `softmax(hidden @ weight.T / temperature)`.

    Args:
        hidden: float [tokens, width], states that predict the targets.
        weight: float [vocabulary, width], the output embedding.
        targets: int64 [tokens].
        temperature: What the logits are divided by, above 0.
        chunk_tokens: Tokens whose logits exist at once.

    Returns:
        Log-probabilities and entropies, float [tokens] each, both with gradient.
    """
    if temperature <= 0:
        raise ValueError(
            f"temperature must be above 0, found {temperature}: greedy tokens have no policy "
            "gradient"
        )
    scored = _TokenLogprobs.apply(hidden, weight, targets, temperature, chunk_tokens)
    return cast(tuple[Tensor, Tensor], scored)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(len(targets))
        entropies = hidden.new_empty(len(targets))
        normalisers = hidden.new_empty(len(targets))
        for start in range(0, len(targets), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits = (hidden[part] @ weight.t()).div_(temperature)
            normaliser = logits.logsumexp(-1)
            normalisers[part] = normaliser
            logprobs[part] = logits.gather(1, targets[part, None])[:, 0] - normaliser
            logs = logits.sub_(normaliser[:, None])
            entropies[part] = -(logs.exp() * logs).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, normalisers, entropies)
        ctx.temperature = temperature
        ctx.chunk_tokens = chunk_tokens
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, targets, normalisers, entropies = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        for start in range(0, len(targets), ctx.chunk_tokens):
            part = slice(start, start + ctx.chunk_tokens)
            logs = (hidden[part] @ weight.t()).div_(ctx.temperature)
            logs.sub_(normalisers[part, None])
            probabilities = logs.exp()
            # d logprob / d logit = [is target] - p;  d entropy / d logit = -p (log p + entropy)
            inner = grad_logprobs[part, None] + grad_entropies[part, None] * (
                logs.add_(entropies[part, None])
            )
            grad = probabilities.mul_(inner).neg_()
            grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            grad.div_(ctx.temperature)
            grad_hidden[part] = grad @ weight
            grad_weight.addmm_(grad.t(), hidden[part])
        return grad_hidden, grad_weight, None, None, None
