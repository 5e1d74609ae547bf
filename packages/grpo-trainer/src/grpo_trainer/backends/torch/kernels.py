"""Two operations whose stock form makes many passes over memory on a CPU.

Both are exact, with their gradients written out; there is no approximation in them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Scale the last axis to a root mean square of 1, then by `weight`."""
    return cast(Tensor, _RmsNorm.apply(x, weight, epsilon))


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply rotary position embedding; halves of the last axis form the pairs.

    Args:
        x: float [tokens, heads, width].
        cosine: float [tokens, 1, width / 2], no gradient.
        sine: float [tokens, 1, width / 2], no gradient.
    """
    return cast(Tensor, _Rotate.apply(x, cosine, sine))


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        unit: Tensor = x * scale
        ctx.save_for_backward(unit, weight, scale)
        return unit * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, weight, scale = ctx.saved_tensors
        product = grad * unit
        width = unit.shape[-1]
        grad_weight = product.reshape(-1, width).sum(0)
        along = (product @ weight[:, None]).div_(width)
        grad_x = torch.addcmul(grad * weight, unit, along, value=-1).mul_(scale)
        return grad_x, grad_weight, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _turned(x, cosine, sine, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _turned(grad, cosine, sine, -1), None, None


def _turned(x: Tensor, cosine: Tensor, sine: Tensor, direction: int) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.mul(first, cosine, out=out[..., :half]).addcmul_(second, sine, value=-direction)
    torch.mul(second, cosine, out=out[..., half:]).addcmul_(first, sine, value=direction)
    return out
