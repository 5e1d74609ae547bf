"""Which tensors of a checkpoint SGLang keeps as one, and in which order.

    model.layers.0.self_attn.qkv_proj.weight    q_proj, k_proj, v_proj
    model.layers.0.mlp.gate_up_proj.weight      gate_proj, up_proj
    model.layers.0.mlp.experts.w13_weight       of each expert in turn: gate_proj, up_proj
    model.layers.0.mlp.experts.w2_weight        of each expert in turn: down_proj

All are joined along the first dimension, so the fused tensor's bytes are those of its parts one
after the other. That holds for an engine that keeps whole tensors, not for shards of them. Read off
SGLang 0.5.23 for Qwen3 and Qwen3-MoE; other tensors keep their names.
"""

import re
from collections.abc import Iterable, Mapping

_PARTS: Mapping[str, tuple[str, int]] = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_EXPERT_PARTS: Mapping[str, tuple[str, int]] = {
    "gate_proj": ("w13", 0),
    "up_proj": ("w13", 1),
    "down_proj": ("w2", 0),
}
_NAME = re.compile(r"(.+\.)?(\w+)\.(weight|bias)")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|bias)")


def fused_parts(names: Iterable[str]) -> dict[str, list[str]]:
    """Return for each tensor of the engine the checkpoint's tensors it consists of, in order."""
    placed: dict[str, list[tuple[int, int, str]]] = {}
    for name in names:
        fused, expert, place = _place(name)
        placed.setdefault(fused, []).append((expert, place, name))
    return {fused: [name for _, _, name in sorted(parts)] for fused, parts in placed.items()}


def _place(name: str) -> tuple[str, int, int]:
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        fused, place = _EXPERT_PARTS[expert[3]]
        return f"{expert[1]}.{fused}_{expert[4]}", int(expert[2]), place
    match = _NAME.fullmatch(name)
    if match is not None and match[2] in _PARTS:
        fused, place = _PARTS[match[2]]
        return f"{match[1] or ''}{fused}.{match[3]}", 0, place
    return name, 0, 0
