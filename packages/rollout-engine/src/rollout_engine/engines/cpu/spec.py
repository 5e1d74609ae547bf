"""The shape of a model, read from its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_engine.engines.errors import WeightUpdateFailed

_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts in place of the dense MLP of some layers."""

    count: int
    per_token: int
    intermediate: int
    normalise: bool
    """Whether the chosen experts' weights are scaled to sum to one."""
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything about a Qwen3 or Qwen3-MoE model but its weights."""

    model_type: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    experts: ExpertsSpec | None = None

    @property
    def architecture(self) -> str:
        """The name of the class that the checkpoint was saved from."""
        return _ARCHITECTURES[self.model_type]

    @property
    def group(self) -> int:
        """Query heads that share one key and value head."""
        return self.heads // self.kv_heads

    def differences(self, other: ModelSpec) -> str:
        """Say in what `other` differs so that its weights can't take this model's place."""
        return ", ".join(
            f"{name} {getattr(self, name)} and {getattr(other, name)}"
            for name in ModelSpec.__dataclass_fields__
            if name not in ("eos_token_ids", "max_positions")
            and getattr(self, name) != getattr(other, name)
        )


def read_spec(folder: Path) -> ModelSpec:
    """Read `config.json`, and `generation_config.json` for the end tokens if it is there.

    Raises:
        WeightUpdateFailed: no such folder, a broken file, or a model this engine can't compute.
    """
    config = _read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    try:
        return parse_spec(config, generation)
    except KeyError as error:
        raise WeightUpdateFailed(f"{folder / 'config.json'}: the key {error} is missing") from error
    except ValueError as error:
        raise WeightUpdateFailed(f"{folder / 'config.json'}: {error}") from error


def parse_spec(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelSpec:
    """Make a spec of the two files' contents.

    Raises:
        KeyError: a key is missing.
        ValueError: the model has a feature that this engine doesn't compute.
    """
    model_type = config["model_type"]
    if model_type not in _ARCHITECTURES:
        raise ValueError(f"model_type must be one of {sorted(_ARCHITECTURES)}, found {model_type}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    for name, wanted, found in (
        ("attention_bias", False, bool(config.get("attention_bias", False))),
        ("use_sliding_window", False, bool(config.get("use_sliding_window", False))),
        ("hidden_act", "silu", config.get("hidden_act", "silu")),
        ("rope_type", "default", rope_type),
    ):
        if wanted != found:
            raise ValueError(f"{name} must be {wanted}, found {found}: not computed by this engine")
    heads = int(config["num_attention_heads"])
    spec = ModelSpec(
        model_type=model_type,
        vocab=int(config["vocab_size"]),
        hidden=int(config["hidden_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        intermediate=int(config["intermediate_size"]),
        norm_eps=float(config["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        max_positions=int(config["max_position_embeddings"]),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_eos(config, generation),
        experts=_experts(config) if model_type == "qwen3_moe" else None,
    )
    if spec.heads % spec.kv_heads or spec.head_dim % 2:
        raise ValueError(
            f"num_attention_heads must be a multiple of num_key_value_heads and head_dim even, "
            f"found {spec.heads}, {spec.kv_heads} and {spec.head_dim}"
        )
    return spec


def _experts(config: Mapping[str, Any]) -> ExpertsSpec | None:
    # transformers 5 renamed the key; checkpoints of both kinds are about.
    count = int(config.get("num_local_experts") or config.get("num_experts") or 0)
    step = int(config.get("decoder_sparse_step", 1))
    dense = set(config.get("mlp_only_layers") or ())
    layers = tuple(
        index
        for index in range(int(config["num_hidden_layers"]))
        if count > 0 and index not in dense and (index + 1) % step == 0
    )
    if not layers:
        return None
    return ExpertsSpec(
        count=count,
        per_token=int(config["num_experts_per_tok"]),
        intermediate=int(config["moe_intermediate_size"]),
        normalise=bool(config.get("norm_topk_prob", False)),
        layers=layers,
    )


def _eos(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    found: set[int] = set()
    for source in (config, generation):
        value = source.get("eos_token_id")
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, list):
            found.update(value)
    return tuple(sorted(found))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise WeightUpdateFailed(
            f"cannot read {path}: {error.strerror}; give a folder in Hugging Face's layout"
        ) from error
    except ValueError as error:
        raise WeightUpdateFailed(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightUpdateFailed(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


__all__ = ["ExpertsSpec", "ModelSpec", "parse_spec", "read_spec"]
