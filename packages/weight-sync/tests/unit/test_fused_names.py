"""Which tensors SGLang joins, and in which order; against a real server in tests/engines."""

import random

from hypothesis import given
from hypothesis import strategies as st
from weight_sync.core.fused_names import fused_parts


def test_attention_and_mlp_are_joined_in_sglang_s_order() -> None:
    at = "model.layers.3"
    names = [
        f"{at}.mlp.up_proj.weight",
        f"{at}.self_attn.v_proj.bias",
        f"{at}.self_attn.k_proj.bias",
        f"{at}.self_attn.q_proj.bias",
        f"{at}.mlp.gate_proj.weight",
        f"{at}.mlp.down_proj.weight",
        f"{at}.self_attn.o_proj.weight",
        f"{at}.self_attn.q_norm.weight",
        "lm_head.weight",
    ]
    assert fused_parts(names) == {
        f"{at}.mlp.gate_up_proj.weight": [names[4], names[0]],
        f"{at}.self_attn.qkv_proj.bias": [names[3], names[2], names[1]],
        f"{at}.mlp.down_proj.weight": [names[5]],
        f"{at}.self_attn.o_proj.weight": [names[6]],
        f"{at}.self_attn.q_norm.weight": [names[7]],
        "lm_head.weight": ["lm_head.weight"],
    }


def test_experts_are_joined_by_number_and_not_by_text() -> None:
    at = "model.layers.0.mlp.experts"
    names = [f"{at}.{e}.{p}_proj.weight" for e in range(11) for p in ("up", "down", "gate")]
    parts = fused_parts([*names, "model.layers.0.mlp.gate.weight"])
    assert parts == {
        f"{at}.w13_weight": [
            f"{at}.{e}.{p}_proj.weight" for e in range(11) for p in ("gate", "up")
        ],
        f"{at}.w2_weight": [f"{at}.{e}.down_proj.weight" for e in range(11)],
        "model.layers.0.mlp.gate.weight": ["model.layers.0.mlp.gate.weight"],
    }


@given(st.lists(st.text(st.characters(codec="ascii")), unique=True), st.randoms())
def test_no_tensor_is_lost_or_used_twice_whatever_its_name(
    names: list[str], rng: random.Random
) -> None:
    parts = fused_parts(names)
    assert sorted(name for group in parts.values() for name in group) == sorted(names)
    rng.shuffle(names)
    assert fused_parts(names) == parts
