"""Tiny model folders, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

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


CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|assistant|>{{ message.content }}<|end|>"
    "{% elif loop.first %}<|user|>{{ message.content }}<|end|>"
    "{% else %}<|tool|>{{ message.content }}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>")


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of characters and a chat template, for the vocabulary of `DENSE`."""
    characters = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,:+-*/=()_'\""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, "?", *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
