"""The mixture of experts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rollout_engine.engines.cpu.weights import ExpertsMlp


def add_experts(x: Tensor, normed: Tensor, mlp: ExpertsMlp) -> None:
    """Add the chosen experts' output to `x` [tokens, hidden]."""
    spec = mlp.spec
    share, expert = torch.softmax(normed @ mlp.router, -1).topk(spec.per_token)
    if spec.normalise:
        share = share / share.sum(-1, keepdim=True)
    # Sorted by expert, each expert's tokens are neighbours: one product each, without padding.
    order = expert.view(-1).argsort(stable=True)
    token = order.div(spec.per_token, rounding_mode="floor")
    ends = np.cumsum(np.bincount(expert.numpy().ravel(), minlength=spec.count)).tolist()
    parts = [
        (index, slice(start, end))
        for index, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
        if end > start
    ]
    inputs = normed.index_select(0, token)
    gate_up = inputs.new_empty(len(token), 2 * spec.intermediate)
    for index, part in parts:
        torch.mm(inputs[part], mlp.gate_up[index], out=gate_up[part])
    gate, up = gate_up.chunk(2, -1)
    act = functional.silu(gate).mul_(up)
    outputs = torch.empty_like(inputs)
    for index, part in parts:
        torch.mm(act[part], mlp.down[index], out=outputs[part])
    outputs.mul_(share.view(-1, 1).index_select(0, order))
    x.index_add_(0, token, outputs)


__all__ = ["add_experts"]
