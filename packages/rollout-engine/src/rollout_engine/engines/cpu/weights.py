"""Weights in the layout that the decode loop wants, and the way from and to a checkpoint's tensors.

One table, `Weights.slots`, maps each tensor of a checkpoint to the memory that holds it. Loading
copies along it in one direction and the checksum of the live weights reads along it in the other,
so the two can't disagree about where a tensor lives.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollout_engine.engines.cpu.spec import ExpertsSpec, ModelSpec
from rollout_engine.engines.errors import WeightUpdateFailed
from rollout_engine.engines.types import WeightsChecksum

DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
}
"""Dtypes a checkpoint may have, by safetensors' names, if what is computed in holds them exactly:
float32 does not hold the last."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a checkpoint's tensor lives.

    Attributes:
        views: Each holds the whole tensor, in the checkpoint's order of elements though not
            contiguous, and possibly with the shape split up. More than one: copies.
    """

    shape: tuple[int, ...]
    views: tuple[Tensor, ...]

    def fill(self, tensor: Tensor) -> None:
        """Copy the tensor in, converting it to the memory's dtype."""
        for view in self.views:
            view.copy_(tensor.view(view.shape))

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return the tensor as the checkpoint has it."""
        first = self.views[0]
        if any(not torch.equal(first, other) for other in self.views[1:]):
            raise RuntimeError("two copies of one tensor differ: memory is corrupt")
        return first.to(dtype).contiguous().view(self.shape)


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """Attributes: gate_up [hidden, 2 * intermediate]; down [intermediate, hidden]."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class ExpertsMlp:
    """Attributes: router [hidden, E]; gate_up [E, hidden, 2 * I]; down [E, I, hidden]."""

    spec: ExpertsSpec
    router: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; matrices are stored as `[in, out]`, which small batches multiply fastest.

    Attributes:
        qkv: [hidden, kv_heads * (group + 2) * head_dim]; for each key head its query heads, then
            the key, then the value, so that no step has to move them together. Within queries and
            keys, dimension i is followed by i + head_dim / 2: the rotary embedding turns these two
            as one complex number, and the products of queries and keys don't mind the order.
        qk_norm: [group + 1, head_dim], the query's weights `group` times, then the key's, in that
            order of dimensions too.
        out: [heads * head_dim, hidden].
    """

    input_norm: Tensor
    qkv: Tensor
    qk_norm: Tensor
    out: Tensor
    mlp_norm: Tensor
    mlp: DenseMlp | ExpertsMlp


@dataclass(frozen=True, slots=True)
class Weights:
    """One version of the weights, all in the dtype that is computed in.

    Attributes:
        embed: [vocab, hidden].
        head: [hidden, vocab].
        dtypes: The checkpoint's dtype of each tensor.
    """

    spec: ModelSpec
    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor
    slots: Mapping[str, Slot]
    dtypes: dict[str, str]

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return self.embed.dtype

    def checksum(self) -> WeightsChecksum:
        """Hash the memory that is being served, tensor by tensor, as the checkpoint's bytes.

        A tensor's checksum is the xxh3-128 of its bytes in the checkpoint's dtype; the root hash is
        the xxh3-128 of the lines `name NUL dtype NUL 2x3 NUL checksum`, in the order of the names,
        joined by newlines: the same as in a weight-sync manifest.
        """
        lines: list[str] = []
        tensors: dict[str, str] = {}
        for name in sorted(self.dtypes):
            dtype = self.dtypes[name]
            slot = self.slots[name]
            data: Any = slot.read(DTYPES[dtype]).view(torch.uint8).numpy()
            tensors[name] = xxhash.xxh3_128_hexdigest(data)
            shape = "x".join(map(str, slot.shape))
            lines.append(f"{name}\0{dtype}\0{shape}\0{tensors[name]}")
        return WeightsChecksum(
            root_hash=xxhash.xxh3_128_hexdigest("\n".join(lines).encode()), tensors=tensors
        )


def load_weights(folder: Path, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Weights:
    """Load a checkpoint into fresh memory. Everything is checked before the first byte is copied.

    Args:
        folder: Of the checkpoint.
        spec: Of its model.
        dtype: What to hold the weights in and compute with.

    Raises:
        WeightUpdateFailed: files are missing, cut off or hold another model or a dtype that would
            be rounded, or a weight is not finite.
    """
    exact = [name for name, stored in DTYPES.items() if torch.promote_types(stored, dtype) == dtype]
    with ExitStack() as stack:
        files = {path: stack.enter_context(_open(path)) for path in _files(folder)}
        where = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118
        weights = _allocate(spec, dtype, with_head="lm_head.weight" in where)
        _check_names(folder, expected=weights.slots.keys(), found=where.keys())
        for name, slot in weights.slots.items():
            part = where[name].get_slice(name)
            shape, found = tuple(part.get_shape()), part.get_dtype()
            if shape != slot.shape or found not in exact:
                raise WeightUpdateFailed(
                    f"{folder}: {name} must have shape {slot.shape} and a dtype of {sorted(exact)} "
                    f"for an engine that computes in {dtype}, found {shape} and {found}"
                )
            weights.dtypes[name] = found
        for name, slot in weights.slots.items():
            tensor = where[name].get_tensor(name)
            if not bool(torch.isfinite(tensor).all()):
                raise WeightUpdateFailed(
                    f"{folder}: {name} holds values that are not finite; publish sound weights"
                )
            slot.fill(tensor)
    if spec.tied_embeddings and "lm_head.weight" in weights.slots:
        head, embed = weights.slots["lm_head.weight"], weights.slots["model.embed_tokens.weight"]
        if not torch.equal(head.views[0], embed.views[0]):
            raise WeightUpdateFailed(
                f"{folder}: tie_word_embeddings is set but lm_head.weight differs from the "
                "embedding; save the model again or untie them"
            )
    return weights


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    try:
        names = json.loads(index.read_bytes())["weight_map"].values()
    except (ValueError, KeyError, AttributeError) as error:
        raise WeightUpdateFailed(f"{index} has no readable weight_map: {error!r}") from error
    return [folder / name for name in sorted(set(names))]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise WeightUpdateFailed(
            f"cannot read {path}: {error}; the file is missing or was cut off while written"
        ) from error


def _check_names(folder: Path, *, expected: Any, found: Any) -> None:
    missing, unknown = sorted(expected - found), sorted(found - expected)
    if missing or unknown:
        raise WeightUpdateFailed(
            f"{folder}: expected the {len(expected)} tensors of this model; "
            f"missing {_some(missing)}, unknown {_some(unknown)}"
        )


def _some(names: list[str]) -> str:
    return f"{names[:3]} and {len(names) - 3} more" if len(names) > 3 else str(names)


def _allocate(spec: ModelSpec, dtype: torch.dtype, *, with_head: bool) -> Weights:
    empty = partial(torch.empty, dtype=dtype)
    embed = empty(spec.vocab, spec.hidden)
    head = empty(spec.hidden, spec.vocab)
    norm = empty(spec.hidden)
    slots: dict[str, Slot] = {"model.norm.weight": _slot(norm)}
    layers: list[Layer] = []
    for index in range(spec.layers):
        layer, layer_slots = _allocate_layer(spec, index, empty)
        layers.append(layer)
        slots |= {f"model.layers.{index}.{name}": slot for name, slot in layer_slots}
    if spec.tied_embeddings:
        slots["model.embed_tokens.weight"] = _slot(embed, head.t())
        if with_head:
            slots["lm_head.weight"] = _slot(head.t())
    else:
        slots["model.embed_tokens.weight"] = _slot(embed)
        slots["lm_head.weight"] = _slot(head.t())
    return Weights(spec, embed, tuple(layers), norm, head, slots, {})


def _slot(*views: Tensor) -> Slot:
    return Slot(tuple(views[0].shape), views)


def _allocate_layer(
    spec: ModelSpec, index: int, empty: Callable[..., Tensor]
) -> tuple[Layer, list[tuple[str, Slot]]]:
    group, head_dim, hidden = spec.group, spec.head_dim, spec.hidden
    qkv = empty(hidden, spec.kv_heads * (group + 2) * head_dim)
    # [kv_heads, group + 2, head_dim, hidden], of which q, k and v are parts
    split = qkv.view(hidden, spec.kv_heads, group + 2, head_dim).permute(1, 2, 3, 0)
    qk_norm = empty(group + 1, head_dim)
    out = empty(spec.heads * head_dim, hidden)
    input_norm, mlp_norm = empty(hidden), empty(hidden)
    pairs = split.view(spec.kv_heads, group + 2, head_dim // 2, 2, hidden).transpose(2, 3)
    norm_pairs = qk_norm.view(group + 1, head_dim // 2, 2).transpose(1, 2)
    query, kv = (spec.heads * head_dim, hidden), (spec.kv_heads * head_dim, hidden)
    slots = [
        ("input_layernorm.weight", _slot(input_norm)),
        ("self_attn.q_proj.weight", Slot(query, (pairs[:, :group],))),
        ("self_attn.k_proj.weight", Slot(kv, (pairs[:, group],))),
        ("self_attn.v_proj.weight", Slot(kv, (split[:, group + 1],))),
        ("self_attn.q_norm.weight", Slot((head_dim,), tuple(norm_pairs[:group]))),
        ("self_attn.k_norm.weight", Slot((head_dim,), (norm_pairs[group],))),
        ("self_attn.o_proj.weight", _slot(out.t())),
        ("post_attention_layernorm.weight", _slot(mlp_norm)),
    ]
    mlp: DenseMlp | ExpertsMlp
    if spec.experts is not None and index in spec.experts.layers:
        mlp = _allocate_experts(hidden, spec.experts, empty)
        slots += _expert_slots(mlp)
    else:
        mlp = DenseMlp(
            gate_up=empty(hidden, 2 * spec.intermediate),
            down=empty(spec.intermediate, hidden),
        )
        slots += [(f"mlp.{name}", slot) for name, slot in _mlp_slots(mlp.gate_up, mlp.down)]
    return Layer(input_norm, qkv, qk_norm, out, mlp_norm, mlp), slots


def _allocate_experts(
    hidden: int, experts: ExpertsSpec, empty: Callable[..., Tensor]
) -> ExpertsMlp:
    return ExpertsMlp(
        spec=experts,
        router=empty(hidden, experts.count),
        gate_up=empty(experts.count, hidden, 2 * experts.intermediate),
        down=empty(experts.count, experts.intermediate, hidden),
    )


def _expert_slots(mlp: ExpertsMlp) -> Iterator[tuple[str, Slot]]:
    yield "mlp.gate.weight", _slot(mlp.router.t())
    for expert in range(mlp.spec.count):
        for name, slot in _mlp_slots(mlp.gate_up[expert], mlp.down[expert]):
            yield f"mlp.experts.{expert}.{name}", slot


def _mlp_slots(gate_up: Tensor, down: Tensor) -> Iterator[tuple[str, Slot]]:
    intermediate = down.shape[0]
    yield "gate_proj.weight", _slot(gate_up[:, :intermediate].t())
    yield "up_proj.weight", _slot(gate_up[:, intermediate:].t())
    yield "down_proj.weight", _slot(down.t())


__all__ = [
    "DTYPES",
    "DenseMlp",
    "ExpertsMlp",
    "Layer",
    "Slot",
    "Weights",
    "load_weights",
]
