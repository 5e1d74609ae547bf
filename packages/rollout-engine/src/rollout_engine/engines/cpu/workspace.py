"""Preallocated memory of a step, and the views of it that the steps work on.

Making a view costs as much as a small operation: the views of each batch size are made once.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from rollout_engine.engines.cpu.cache import KvCache
from rollout_engine.engines.cpu.spec import ModelSpec

MLP_BLOCK = 128
"""Tokens that go through an MLP at once: what lies between its matrices stays in a core's cache."""

AttentionKey = tuple[int, int, int]
"""Decoding rows `[first, end)` and positions."""


class States:
    """Hidden states `x` of some tokens and room for their norm."""

    def __init__(self, memory: Tensor, tokens: int) -> None:
        self.x, self.normed = memory[:, :tokens]
        self.x_array = self.x.numpy()
        self.scale = memory.new_empty(tokens, 1)
        self.scale_array = self.scale.squeeze(-1).numpy()


class MlpBlock:
    """Tokens `[start, end)` on their way through an MLP."""

    def __init__(self, space: Workspace, states: States, start: int, end: int) -> None:
        self.x, self.normed = states.x[start:end], states.normed[start:end]
        self.gate_up, self.act = space.gate_up[: end - start], space.act[: end - start]
        self.gate, self.up = self.gate_up.chunk(2, -1)


class Views:
    """The workspace cut to a number of packed tokens."""

    def __init__(self, space: Workspace, spec: ModelSpec, tokens: int) -> None:
        kv_heads, group, head_dim = spec.kv_heads, spec.group, spec.head_dim
        self.states = States(space.states, tokens)
        self.qkv = space.qkv[:tokens]
        self.heads_flat = self.qkv.view(-1, head_dim)
        heads = self.qkv.view(tokens, kv_heads, group + 2, head_dim)
        self.query_array = heads[:, :, :group].numpy()
        self.key_value_array = heads[:, :, group:].numpy()
        self.query_key = heads[:, :, : group + 1]
        self.query_key_array = self.query_key.numpy()
        self.query_key_pairs = _as_pairs(self.query_key)
        self.head_scale = space.head_scale[:tokens]
        self.head_scale_array = self.head_scale.squeeze(-1).numpy()
        self.head_normed = space.head_normed[:tokens]
        self.head_normed_pairs = _as_pairs(self.head_normed)
        self.rope = space.rope[:tokens]
        self.rope_pairs = _as_pairs(self.rope).unsqueeze(1)
        self.attended = space.attended[:tokens]
        self.mlp_blocks = [
            MlpBlock(space, self.states, start, min(tokens, start + MLP_BLOCK))
            for start in range(0, tokens, MLP_BLOCK)
        ]
        self.kv_index = space.kv_index[:tokens]
        self.ids, self.positions = space.ids[:tokens], space.positions[:tokens]


class Workspace:
    """Preallocated memory for every intermediate result of a step of at most `tokens` tokens."""

    def __init__(self, spec: ModelSpec, tokens: int, dtype: torch.dtype) -> None:
        empty = partial(torch.empty, dtype=dtype)
        hidden, head_dim = spec.hidden, spec.head_dim
        qk = (tokens, spec.kv_heads, spec.group + 1)
        self.states = empty(2, tokens, hidden)
        self.picked = empty(2, tokens, hidden)
        self.qkv = empty(tokens, spec.kv_heads * (spec.group + 2) * head_dim)
        self.head_scale, self.head_normed = empty(*qk, 1), empty(*qk, head_dim)
        self.rope = empty(tokens, spec.group + 1, head_dim)
        self.attended = empty(tokens, spec.heads * head_dim)
        self.gate_up = empty(MLP_BLOCK, 2 * spec.intermediate)
        self.act = empty(MLP_BLOCK, spec.intermediate)
        self.kv_index = np.empty((tokens, spec.kv_heads, 2), np.int64)
        self.ids = torch.empty(tokens, dtype=torch.int64)
        self.positions = torch.empty(tokens, dtype=torch.int64)
        self.ids_array, self.positions_array = self.ids.numpy(), self.positions.numpy()


class Attention:
    """Views for decoding rows `[first, end)` over `length` positions of the cache."""

    def __init__(
        self, spec: ModelSpec, cache: KvCache, space: Workspace, scores: Tensor, key: AttentionKey
    ) -> None:
        first, end, length = key
        rows, flat = end - first, (end - first) * spec.kv_heads
        self.layers = [cache.views(layer, first, end, length) for layer in range(spec.layers)]
        self.mask = cache.mask[first * spec.kv_heads : end * spec.kv_heads, :, :length]
        self.scores = scores[: flat * spec.group * length].view(flat, spec.group, length)
        self.scores_array = self.scores.view(rows, spec.kv_heads, spec.group, length).numpy()
        self.attended = space.attended[first:end].view(flat, spec.group, spec.head_dim)


def _as_pairs(tensor: Tensor) -> Tensor:
    """View neighbours in the last dimension as complex numbers."""
    return torch.view_as_complex(tensor.view(*tensor.shape[:-1], tensor.shape[-1] // 2, 2))


def rope_table(spec: ModelSpec, positions: int, dtype: torch.dtype) -> Tensor:
    """Return `[positions, group + 1, head_dim]`: cosine and sine of each pair of dimensions.

    They are scaled by what the norm of queries and keys leaves out, and queries besides by the
    attention's own factor: `sqrt(head_dim)` for keys, and 1 in all for queries.
    """
    steps = torch.arange(0, spec.head_dim, 2, dtype=dtype) / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**steps
    angles = torch.arange(positions, dtype=dtype)[:, None] * frequencies[None, :]
    pairs = torch.stack([angles.cos(), angles.sin()], -1).flatten(1)
    return torch.stack([pairs] * spec.group + [pairs * spec.head_dim**0.5], 1).contiguous()


__all__ = ["Attention", "AttentionKey", "MlpBlock", "States", "Views", "Workspace", "rope_table"]
