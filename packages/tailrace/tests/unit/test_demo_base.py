"""The model folder that ships with the demo."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path

import pytest
from rollout_engine.agents.template import ChatTemplate, Message
from swe_eval.generate import Split, make_task
from tokenizers import Tokenizer

BASE = Path(str(importlib.resources.files("tailrace_cli.demo"))) / "base"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BASE / "tokenizer.json"))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def test_folder_is_small_and_complete() -> None:
    names = {path.name for path in BASE.iterdir()}
    assert {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= names
    assert sum(path.stat().st_size for path in BASE.iterdir()) <= 8 * 2**20


def test_model_is_a_qwen3_of_at_most_four_million_parameters(tokenizer: Tokenizer) -> None:
    config = json.loads((BASE / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    header_bytes = int.from_bytes((BASE / "model.safetensors").read_bytes()[:8], "little")
    header = json.loads((BASE / "model.safetensors").read_bytes()[8 : 8 + header_bytes])
    shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
    sizes = [shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes]
    assert sum(sizes) <= 4_000_000


@pytest.mark.parametrize("split", list(Split))
def test_text_of_the_world_survives_the_tokenizer(tokenizer: Tokenizer, split: Split) -> None:
    for index in range(20):
        task = make_task(split, index)
        for text in (task.instruction, *task.files.values(), *task.hidden_tests.values()):
            ids = encode(tokenizer, text)
            assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_foreign_characters_become_question_marks(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "caf\u00e9 \u2603\x07\r\n\tok")
    assert tokenizer.decode(ids, skip_special_tokens=False) == "caf? ???\n\tok"


@pytest.mark.parametrize(
    ("command", "most_tokens"),
    [
        ("grep -rn -A3 'def add_bedo'", 5),
        ("sed -i '6c\\    return a - b' shop.py", 10),
        ("python test_shop.py", 3),
        ("submit", 1),
    ],
)
def test_commands_are_few_tokens(tokenizer: Tokenizer, command: str, most_tokens: int) -> None:
    assert len(encode(tokenizer, command)) <= most_tokens


def test_conversation_has_one_token_for_each_role_and_one_for_each_end(
    tokenizer: Tokenizer,
) -> None:
    template = ChatTemplate.from_folder(BASE)
    rendered = template.conversation(
        [Message("user", "ok")], [("submit", [Message("user", "ok")]), ("submit", [])]
    )
    assert [tokenizer.id_to_token(int(i)) for i in rendered.token_ids] == [
        "<|user|>", "ok", "<|end|>", "<|assistant|>", "submit", "<|end|>",
        "<|tool|>", "ok", "<|end|>", "<|assistant|>", "submit", "<|end|>",
    ]  # fmt: skip
    assert rendered.loss_mask.tolist() == [*[False] * 4, *[True] * 2, *[False] * 4, *[True] * 2]
    assert template.stop_token_ids == (tokenizer.token_to_id("<|end|>"),)
