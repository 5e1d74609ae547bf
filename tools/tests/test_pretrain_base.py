"""tools/pretrain_base.py makes the shipped model: from its own split alone, and reproducibly."""

import json
import random
import re
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from pretrain_base import (
    Recipe,
    build_model,
    build_tokenizer,
    pretrain,
    save,
    token_stream,
    write_document,
)
from swe_eval.generate import Split, make_task
from swe_eval.generate.names import split_of_name

SHIPPED = Path(__file__).resolve().parents[2] / "packages/tailrace/src/tailrace_cli/demo/base"


def documents(count: int) -> list[str]:
    rng = random.Random(3)
    return [write_document(rng, index) for index in range(count)]


def test_corpus_has_no_name_of_another_split() -> None:
    text = "\n".join(documents(120))
    names = set(re.findall(r"\b(?!test_)[a-z]+_([a-z]{4})\b", text))
    assert len(names) > 50
    assert {split_of_name(name) for name in names} == {Split.PRETRAIN}


def test_corpus_is_no_chat() -> None:
    text = "\n".join(documents(120))
    assert "<|" not in text
    assert "submit" not in text
    assert "$ grep -rn -A3 'def " in text
    assert "$ sed -i '" in text
    assert "\nok" in text


def test_sessions_show_what_the_commands_really_print() -> None:
    task = make_task(Split.PRETRAIN, 0)
    text = "\n".join(documents(40))
    shown = re.findall(r"^\w+\.py[:-]\d+[:-].*$", text, re.MULTILINE)
    assert shown
    assert all(len(line) < 120 for line in shown)
    assert task.module.endswith(".py")


def test_same_seed_same_corpus() -> None:
    tokenizer = build_tokenizer()
    assert token_stream(tokenizer, 10, 5).equal(token_stream(tokenizer, 10, 5))
    assert not token_stream(tokenizer, 10, 5).equal(token_stream(tokenizer, 10, 6))


def test_shipped_tokenizer_is_the_one_built_here() -> None:
    shipped = json.loads((SHIPPED / "tokenizer.json").read_text())
    assert json.loads(build_tokenizer().to_str()) == shipped


def test_training_learns_and_writes_a_model_folder(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    stream = token_stream(tokenizer, 40, 0)
    torch.set_num_threads(1)
    recipe = Recipe(steps=41, batch=2, window=32, warmup_steps=5)
    model = build_model(recipe, tokenizer.get_vocab_size(), 0)
    losses = [loss for _, loss in pretrain(model, stream, recipe, 0)]
    assert losses[-1] < losses[0] - 1
    save(model, tokenizer, tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        path.name for path in SHIPPED.iterdir()
    }
