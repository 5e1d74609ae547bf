"""Tiny model folders, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from grpo_trainer.backends.torch import qwen3

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "attention_bias": False,
}
MOE: dict[str, Any] = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
}


def write_model(
    folder: Path,
    config: dict[str, Any] = DENSE,
    *,
    seed: int = 0,
    scale: float = 0.25,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write config.json and random weights; large ones, so that every term matters."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = qwen3.parameter_shapes(qwen3.Qwen3Shape.from_folder(folder))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        tensors[name] = (1 + 0.1 * values if len(shape) == 1 else scale * values).to(dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder
