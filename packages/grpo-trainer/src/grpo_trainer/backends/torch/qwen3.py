"""Qwen3 and Qwen3-MoE over the tensors of a Hugging Face model folder, for training.

Parameters keep the folder's names and shapes, so that loading and publishing are copies. The
forward pass takes packed sequences and gives hidden states only at the positions asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from grpo_trainer.backends.torch.kernels import rms_norm, rotate
from grpo_trainer.backends.torch.packing import Packed, causal_attention
from grpo_trainer.errors import ModelError

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Shape:
    """What a model folder's config.json says of the computation."""

    model_type: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    mlp: int
    norm_epsilon: float
    rope_theta: float
    tied: bool
    context_tokens: int
    experts: int = 0
    experts_per_token: int = 0
    expert_mlp: int = 0
    normalise_routing: bool = False
    sparse_layers: tuple[int, ...] = ()

    @classmethod
    def from_folder(cls, folder: Path) -> Qwen3Shape:
        """Read config.json.

        Raises:
            ModelError: It is missing, or asks for something that is not computed here.
        """
        file = folder / "config.json"
        try:
            config = json.loads(file.read_bytes())
        except OSError as error:
            raise ModelError(
                f"{file}: cannot be read ({error.strerror}); expected a model folder with "
                "config.json and model.safetensors"
            ) from error
        except ValueError as error:
            raise ModelError(f"{file}: not JSON: {error}") from error
        _refuse_unsupported(file, config)
        layers = int(config["num_hidden_layers"])
        heads = int(config["num_attention_heads"])
        shape = cls(
            model_type=config["model_type"],
            vocabulary=int(config["vocab_size"]),
            hidden=int(config["hidden_size"]),
            layers=layers,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads", heads)),
            head_width=int(config.get("head_dim") or config["hidden_size"] // heads),
            mlp=int(config["intermediate_size"]),
            norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(config),
            tied=bool(config.get("tie_word_embeddings", False)),
            context_tokens=int(config.get("max_position_embeddings", 32768)),
        )
        if shape.model_type == "qwen3":
            return shape
        return _with_experts(shape, config)


def _refuse_unsupported(file: Path, config: Mapping[str, Any]) -> None:
    found = config.get("model_type")
    if found not in ARCHITECTURES:
        raise ModelError(
            f"{file}: model_type is {found!r}; the torch back-end trains {sorted(ARCHITECTURES)}"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    asked = {
        "rope type": kind,
        "attention_bias": bool(config.get("attention_bias")),
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "hidden_act": config.get("hidden_act", "silu"),
    }
    computed = {
        "rope type": "default",
        "attention_bias": False,
        "use_sliding_window": False,
        "hidden_act": "silu",
    }
    wrong = {name: value for name, value in asked.items() if value != computed[name]}
    if wrong:
        raise ModelError(f"{file}: the torch back-end does not compute {wrong}")


def _rope_theta(config: Mapping[str, Any]) -> float:
    rope = config.get("rope_parameters") or {}
    return float(rope.get("rope_theta", config.get("rope_theta", 1e4)))


def _with_experts(shape: Qwen3Shape, config: Mapping[str, Any]) -> Qwen3Shape:
    every = int(config.get("decoder_sparse_step", 1))
    dense = set(config.get("mlp_only_layers") or ())
    experts = int(config["num_experts"])
    sparse = tuple(
        layer
        for layer in range(shape.layers)
        if layer not in dense and experts > 0 and (layer + 1) % every == 0
    )
    values = {field: getattr(shape, field) for field in shape.__dataclass_fields__}
    values |= {
        "experts": experts,
        "experts_per_token": int(config["num_experts_per_tok"]),
        "expert_mlp": int(config["moe_intermediate_size"]),
        "normalise_routing": bool(config.get("norm_topk_prob", False)),
        "sparse_layers": sparse,
    }
    return Qwen3Shape(**values)


def parameter_shapes(shape: Qwen3Shape) -> dict[str, tuple[int, ...]]:
    """List every tensor that the model needs, by its name in the folder."""
    hidden, width = shape.hidden, shape.head_width
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    if not shape.tied:
        shapes["lm_head.weight"] = (shape.vocabulary, hidden)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (shape.heads * width, hidden),
            f"{at}self_attn.k_proj.weight": (shape.kv_heads * width, hidden),
            f"{at}self_attn.v_proj.weight": (shape.kv_heads * width, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, shape.heads * width),
            f"{at}self_attn.q_norm.weight": (width,),
            f"{at}self_attn.k_norm.weight": (width,),
        }
        if layer in shape.sparse_layers:
            shapes[f"{at}mlp.gate.weight"] = (shape.experts, hidden)
            for expert in range(shape.experts):
                inside = f"{at}mlp.experts.{expert}."
                shapes |= _mlp_shapes(inside, hidden, shape.expert_mlp)
        else:
            shapes |= _mlp_shapes(f"{at}mlp.", hidden, shape.mlp)
    return shapes


def _mlp_shapes(at: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}gate_proj.weight": (inner, hidden),
        f"{at}up_proj.weight": (inner, hidden),
        f"{at}down_proj.weight": (hidden, inner),
    }


def hidden_states(
    shape: Qwen3Shape, weights: Mapping[str, Tensor], packed: Packed, keep: Tensor
) -> Tensor:
    """Run the model and give the normed last hidden states at some tokens.

    Args:
        shape: Of the model.
        weights: By name, as `parameter_shapes` lists them.
        packed: The sequences.
        keep: int64 [kept], indices into the packed tokens.

    Returns:
        float [kept, hidden].
    """
    x = functional.embedding(packed.token_ids, weights["model.embed_tokens.weight"])
    cosine, sine = _rotary(shape, packed.positions, x.dtype)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        inner = rms_norm(x, weights[f"{at}input_layernorm.weight"], shape.norm_epsilon)
        mixed = _attention(shape, weights, at, inner, packed, cosine, sine)
        if layer == shape.layers - 1:
            # Nothing attends to the last layer's output: it is needed where it is read alone.
            x, mixed = x.index_select(0, keep), mixed.index_select(0, keep)
        x = x + functional.linear(mixed, weights[f"{at}self_attn.o_proj.weight"])
        inner = rms_norm(x, weights[f"{at}post_attention_layernorm.weight"], shape.norm_epsilon)
        if layer in shape.sparse_layers:
            x = x + _experts(shape, weights, f"{at}mlp.", inner)
        else:
            x = x + _mlp(weights, f"{at}mlp.", inner)
    return rms_norm(x, weights["model.norm.weight"], shape.norm_epsilon)


def output_weight(shape: Qwen3Shape, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the matrix [vocabulary, hidden] that turns hidden states into logits."""
    return weights["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]


def _rotary(shape: Qwen3Shape, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    exponents = torch.arange(0, shape.head_width, 2, device=positions.device, dtype=dtype)
    frequencies = 1.0 / (shape.rope_theta ** (exponents / shape.head_width))
    angles = positions.to(dtype)[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def _attention(
    shape: Qwen3Shape,
    weights: Mapping[str, Tensor],
    at: str,
    x: Tensor,
    packed: Packed,
    cosine: Tensor,
    sine: Tensor,
) -> Tensor:
    def heads(name: str, count: int) -> Tensor:
        projected = functional.linear(x, weights[f"{at}self_attn.{name}_proj.weight"])
        return projected.view(-1, count, shape.head_width)

    def normed(name: str, value: Tensor) -> Tensor:
        weight = weights[f"{at}self_attn.{name}_norm.weight"]
        return rotate(rms_norm(value, weight, shape.norm_epsilon), cosine, sine)

    query = normed("q", heads("q", shape.heads))
    key = normed("k", heads("k", shape.kv_heads))
    return causal_attention(query, key, heads("v", shape.kv_heads), packed)


def _mlp(weights: Mapping[str, Tensor], at: str, x: Tensor) -> Tensor:
    gate = functional.silu(functional.linear(x, weights[f"{at}gate_proj.weight"]))
    up = functional.linear(x, weights[f"{at}up_proj.weight"])
    return functional.linear(gate * up, weights[f"{at}down_proj.weight"])


def _experts(shape: Qwen3Shape, weights: Mapping[str, Tensor], at: str, x: Tensor) -> Tensor:
    routing = functional.linear(x, weights[f"{at}gate.weight"]).softmax(-1)
    shares, chosen = routing.topk(shape.experts_per_token, dim=-1)
    if shape.normalise_routing:
        shares = shares / shares.sum(-1, keepdim=True)
    mixed = torch.zeros_like(x)
    for expert in range(shape.experts):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        out = _mlp(weights, f"{at}experts.{expert}.", x.index_select(0, token))
        mixed = mixed.index_add(0, token, out * shares[token, place, None])
    return mixed
