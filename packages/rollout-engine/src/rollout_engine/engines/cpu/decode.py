"""The model's forward pass over a mixed batch: one token of each decoding row and prompt chunks.

All tokens of a step are packed into one matrix, so that only attention knows rows. Small models
spend their time on the overhead of operations, not in them: hence the preallocated outputs, the
views kept for each batch size, and the fused and transposed matrices of `weights.Layer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from rollout_engine.engines.cpu.cache import Floats, KvCache, round_up
from rollout_engine.engines.cpu.experts import add_experts
from rollout_engine.engines.cpu.segments import Segment
from rollout_engine.engines.cpu.spec import ModelSpec
from rollout_engine.engines.cpu.weights import DenseMlp, Layer, Weights
from rollout_engine.engines.cpu.workspace import (
    Attention,
    AttentionKey,
    States,
    Views,
    Workspace,
    rope_table,
)

_MAX_KEPT_VIEWS = 1024
_PAD_ALLOWANCE = 64
"""Rows are padded to the longest of their group while that wastes at most so many tokens more than
half of the group's own."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens `[start, start + count)` of the sequence in `row`, at `offset` among the packed."""

    row: int
    start: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class _Group:
    """Chunks of neighbouring rows whose attention is computed in one go.

    Attributes:
        queries: Where the padded queries `[rows, kv_heads, time, group]` lie among the packed.
        outputs: Where the packed tokens' `[tokens, kv_heads, group]` lie among the padded outputs
            `[rows, kv_heads, time, group]`.
        mask: `[rows, 1, time * group, length]`, added to the scores.
    """

    first_row: int
    end_row: int
    first_token: int
    end_token: int
    time: int
    length: int
    queries: Tensor
    outputs: Tensor
    mask: Tensor


class Decoder:
    """Computes steps over one KV cache.

    Args:
        spec: The model's shape.
        cache: Gets the keys and values of every token computed.
        prompt_tokens: Prompt tokens in one step, at most.
    """

    def __init__(self, spec: ModelSpec, cache: KvCache, prompt_tokens: int) -> None:
        self._spec = spec
        self._cache = cache
        self._space = Workspace(spec, cache.rows + prompt_tokens, cache.dtype)
        scores = cache.rows * spec.heads * cache.positions
        self._scores = torch.empty(scores, dtype=cache.dtype)
        self._rope = rope_table(spec, cache.positions, cache.dtype)
        # numpy wants its scalars typed: a Python float would be converted at every call.
        self._scalar = cache.array_dtype.type
        self._hidden = self._scalar(spec.hidden)
        self._eps = self._scalar(spec.norm_eps)
        self._head_eps = self._scalar(spec.norm_eps * spec.head_dim)
        self._views: dict[int, Views] = {}
        self._picked: dict[int, States] = {}
        self._states = States(self._space.states, 0)
        self._attention: dict[AttentionKey, Attention] = {}

    def forward(
        self,
        weights: Weights,
        last: NDArray[np.int64],
        computed: NDArray[np.int64],
        segments: Sequence[Segment],
        chunks: Sequence[PromptChunk] = (),
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """Compute one step and write the tokens' keys and values into the cache.

        The packed tokens are the decoding rows' and then the chunks'; `logits` reads their states.

        Args:
            weights: To compute with.
            last: Of the decoding rows `[0, len(last))`, the token to compute.
            computed: Of these rows, its position.
            segments: Of these rows, which are computed in one attention call.
            chunks: Of neighbouring rows from `len(last)` on, in order.
            prompt_ids: The chunks' tokens, one after the other.
        """
        decoding = len(last)
        views = self._stage(decoding, last, computed, chunks, prompt_ids)
        self._cache.use(computed)
        parts = [
            (views.query_array[first:end], self._attention_of(first, end, computed))
            for first, end in segments
        ]
        groups = [self._group(part) for part in _grouped(chunks)]
        states = self._states = views.states
        torch.index_select(weights.embed, 0, views.ids, out=states.x)
        for index, layer in enumerate(weights.layers):
            self._project(views, layer)
            self._cache.layers[index][views.kv_index] = views.key_value_array
            for queries, attention in parts:
                _attend(queries, attention, index)
            for group in groups:
                self._attend_group(views, group, index)
            states.x.addmm_(views.attended, layer.out)
            self._norm(states, layer.mlp_norm)
            if isinstance(layer.mlp, DenseMlp):
                for block in views.mlp_blocks:
                    torch.mm(block.normed, layer.mlp.gate_up, out=block.gate_up)
                    torch.mul(functional.silu(block.gate, inplace=True), block.up, out=block.act)
                    block.x.addmm_(block.act, layer.mlp.down)
            else:
                add_experts(states.x, states.normed, layer.mlp)

    def logits(self, weights: Weights, rows: Sequence[int] | None = None) -> Tensor:
        """Return `[n, vocab]` for all tokens of the last step, or for some of them."""
        states = self._states
        if rows is not None:
            if len(rows) not in self._picked:
                self._picked[len(rows)] = States(self._space.picked, len(rows))
            states = self._picked[len(rows)]
            torch.index_select(self._states.x, 0, torch.tensor(rows), out=states.x)
        self._norm(states, weights.norm)
        return torch.mm(states.normed, weights.head)

    def _stage(
        self,
        decoding: int,
        last: NDArray[np.int64],
        computed: NDArray[np.int64],
        chunks: Sequence[PromptChunk],
        prompt_ids: Sequence[int],
    ) -> Views:
        """Write tokens, positions and places in the cache into the workspace."""
        space, index = self._space, self._cache.index
        tokens = decoding + len(prompt_ids)
        space.ids_array[:decoding] = last
        space.positions_array[:decoding] = computed
        np.add(index[:decoding], computed[:, None, None], out=space.kv_index[:decoding])
        space.ids_array[decoding:tokens] = prompt_ids
        for chunk in chunks:
            place = slice(chunk.offset, chunk.offset + chunk.count)
            positions = space.positions_array[place]
            positions[:] = np.arange(chunk.start, chunk.start + chunk.count)
            space.kv_index[place] = index[chunk.row] + positions[:, None, None]
        views = self._views.get(tokens)
        if views is None:
            views = self._views[tokens] = Views(self._space, self._spec, tokens)
        torch.index_select(self._rope, 0, views.positions, out=views.rope)
        return views

    def _norm(self, states: States, weight: Tensor) -> None:
        # Of one number for each token, numpy is done sooner than torch.
        scale = states.scale_array
        np.vecdot(states.x_array, states.x_array, out=scale)
        np.divide(scale, self._hidden, out=scale)
        np.add(scale, self._eps, out=scale)
        torch.mul(states.x, states.scale.rsqrt_(), out=states.normed)
        states.normed.mul_(weight)

    def _project(self, views: Views, layer: Layer) -> None:
        """Make queries, keys and values, normed and rotated, in `views.qkv`."""
        self._norm(views.states, layer.input_norm)
        torch.mm(views.states.normed, layer.qkv, out=views.qkv)
        # x * rsqrt(sum(x * x) + head_dim * eps): the table of rotations has the missing factor.
        scale = views.head_scale_array
        np.vecdot(views.query_key_array, views.query_key_array, out=scale)
        np.add(scale, self._head_eps, out=scale)
        torch.mul(views.query_key, views.head_scale.rsqrt_(), out=views.head_normed)
        views.head_normed.mul_(layer.qk_norm)
        torch.mul(views.head_normed_pairs, views.rope_pairs, out=views.query_key_pairs)

    def _attention_of(self, first: int, end: int, computed: NDArray[np.int64]) -> Attention:
        key = (first, end, round_up(int(computed[first:end].max()) + 1))
        attention = self._attention.get(key)
        if attention is None:
            if len(self._attention) >= _MAX_KEPT_VIEWS:
                self._attention.clear()
            attention = Attention(self._spec, self._cache, self._space, self._scores, key)
            self._attention[key] = attention
        return attention

    def _group(self, chunks: Sequence[PromptChunk]) -> _Group:
        spec = self._spec
        rows, time = len(chunks), max(chunk.count for chunk in chunks)
        first_row, first_token = chunks[0].row, chunks[0].offset
        length = round_up(max(chunk.start + chunk.count for chunk in chunks))
        starts = np.array([chunk.start for chunk in chunks])
        counts = np.array([chunk.count for chunk in chunks])
        offsets = np.array([chunk.offset for chunk in chunks])
        for chunk in chunks:
            self._cache.use_range(chunk.row, chunk.start + chunk.count)
        heads, group = np.arange(spec.kv_heads), np.arange(spec.group)
        # Padding repeats a row's last token: what it computes is never read.
        steps = np.minimum(np.arange(time)[None, :], counts[:, None] - 1)
        packed = offsets[:, None] + steps
        queries = (packed[:, None, :] * spec.kv_heads + heads[None, :, None]) * (spec.group + 2)
        row = np.repeat(np.arange(rows), counts)
        step = np.arange(len(row)) - np.repeat(offsets - first_token, counts)
        outputs = ((row[:, None] * spec.kv_heads + heads) * time + step[:, None]) * spec.group
        allowed = np.arange(length)[None, None, :] <= (starts[:, None] + steps)[:, :, None]
        mask = np.where(allowed, self._scalar(0), self._scalar(-np.inf))
        return _Group(
            first_row=first_row,
            end_row=first_row + rows,
            first_token=first_token,
            end_token=first_token + len(row),
            time=time,
            length=length,
            queries=torch.from_numpy((queries[..., None] + group).reshape(-1)),
            outputs=torch.from_numpy((outputs[..., None] + group).reshape(-1)),
            mask=torch.from_numpy(np.repeat(mask, spec.group, axis=1)[:, None]),
        )

    def _attend_group(self, views: Views, group: _Group, layer: int) -> None:
        spec = self._spec
        rows = group.end_row - group.first_row
        keys, values = self._cache.rows_view(layer, group.first_row, group.end_row, group.length)
        queries = views.heads_flat.index_select(0, group.queries)
        attended = functional.scaled_dot_product_attention(
            queries.view(rows, spec.kv_heads, group.time * spec.group, spec.head_dim),
            keys,
            values,
            attn_mask=group.mask,
            scale=1.0,
        )
        flat = attended.reshape(-1, spec.head_dim)
        out = views.attended[group.first_token : group.end_token].view(-1, spec.head_dim)
        torch.index_select(flat, 0, group.outputs, out=out)


def _attend(queries: Floats, attention: Attention, layer: int) -> None:
    keys, values = attention.layers[layer]
    # numpy's BLAS is called once for each head: for such small products that takes half the time
    # of torch.bmm, which shines where the other factor isn't transposed.
    np.matmul(queries, keys, out=attention.scores_array)
    torch.softmax(attention.scores.add_(attention.mask), -1, out=attention.scores)
    torch.bmm(attention.scores, values, out=attention.attended)


def _grouped(chunks: Sequence[PromptChunk]) -> list[list[PromptChunk]]:
    """Cut neighbouring chunks into groups that lose little when padded to their longest."""
    groups: list[list[PromptChunk]] = []
    total = longest = 0
    for chunk in chunks:
        padded = (len(groups[-1]) + 1) * max(longest, chunk.count) if groups else 0
        if groups and padded <= 1.5 * (total + chunk.count) + _PAD_ALLOWANCE:
            groups[-1].append(chunk)
            total, longest = total + chunk.count, max(longest, chunk.count)
        else:
            groups.append([chunk])
            total = longest = chunk.count
    return groups


__all__ = ["Decoder", "PromptChunk"]
