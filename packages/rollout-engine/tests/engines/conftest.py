from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

VOCAB = 97

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
MOE: dict[str, Any] = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}


def tensors_of(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Random weights: large enough that the distributions are far from flat, and small enough that
    float32 itself is good for 1e-5 (logits of 30 are not: transformers is 2e-5 off the truth)."""
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random).mul(1.5 / columns**0.5)

    def norm(size: int) -> torch.Tensor:
        return 1.0 + 0.3 * torch.randn(size, generator=random)

    hidden, head_dim = config["hidden_size"], config["head_dim"]
    query = config["num_attention_heads"] * head_dim
    kv = config["num_key_value_heads"] * head_dim
    tensors = {
        "model.embed_tokens.weight": 3 * matrix(config["vocab_size"], hidden) / 2,
        "model.norm.weight": norm(hidden),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        tensors |= {
            f"{at}input_layernorm.weight": norm(hidden),
            f"{at}post_attention_layernorm.weight": norm(hidden),
            f"{at}self_attn.q_proj.weight": matrix(query, hidden),
            f"{at}self_attn.k_proj.weight": matrix(kv, hidden),
            f"{at}self_attn.v_proj.weight": matrix(kv, hidden),
            f"{at}self_attn.o_proj.weight": matrix(hidden, query),
            f"{at}self_attn.q_norm.weight": norm(head_dim),
            f"{at}self_attn.k_norm.weight": norm(head_dim),
        }
        mlps = {f"{at}mlp.": config["intermediate_size"]}
        if "num_experts" in config and layer not in config["mlp_only_layers"]:
            tensors[f"{at}mlp.gate.weight"] = matrix(config["num_experts"], hidden)
            size = config["moe_intermediate_size"]
            mlps = {f"{at}mlp.experts.{expert}.": size for expert in range(config["num_experts"])}
        for name, size in mlps.items():
            tensors |= {
                f"{name}gate_proj.weight": matrix(size, hidden),
                f"{name}up_proj.weight": matrix(size, hidden),
                f"{name}down_proj.weight": matrix(hidden, size),
            }
    return tensors


WriteModel = Callable[..., Path]


@pytest.fixture(scope="session")
def write_model(tmp_path_factory: pytest.TempPathFactory) -> WriteModel:
    """Write a random model in Hugging Face's layout and return its folder."""

    def write(
        kind: str = "dense", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
    ) -> Path:
        config = (MOE if kind == "moe" else DENSE) | changes
        folder = tmp_path_factory.mktemp(f"{kind}-{seed}-")
        tensors = {name: t.to(dtype) for name, t in tensors_of(config, seed).items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


@pytest.fixture(scope="session")
def dense(write_model: WriteModel) -> Path:
    return write_model("dense", 0)


@pytest.fixture(scope="session")
def dense_b(write_model: WriteModel) -> Path:
    return write_model("dense", 1)


@pytest.fixture(scope="session")
def moe(write_model: WriteModel) -> Path:
    return write_model("moe", 0)


@pytest.fixture(scope="session")
def moe_b(write_model: WriteModel) -> Path:
    return write_model("moe", 1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
