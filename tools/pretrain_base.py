"""Makes the tiny base model that ships with `tailrace demo`.

A small Qwen3 is pretrained on code, issues and shell sessions of the `pretrain` split of the
generated world. The sessions are plain transcripts with a `$ ` prompt, not a chat, and the edits in
them are random: the model learns to read, to copy and to write sound commands, while which edit
repairs a bug stays a guess.

    python tools/pretrain_base.py --out packages/tailrace/src/tailrace_cli/demo/base

Deterministic for a seed on one machine. Takes about 35 minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import string
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from grpo_trainer.backends.torch.optim import Optimizer
from grpo_trainer.config import OptimizerConfig
from swe_eval.generate import (
    BUGS_PER_REPOSITORY,
    GRAMMAR_KINDS,
    MODULE_NAMES,
    SYLLABLES,
    VERBS,
    Split,
    build_repository,
    make_task,
    mutate,
)
from swe_eval.generate.execute import StepBudgetExceededError, load_modules
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

SPECIAL_TOKENS = ("<|pad|>", "<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>")
PAD_ID, TEXT_END_ID, TURN_END_ID = 0, 1, 2

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
<|assistant|>{{ message.content }}<|end|>
{%- elif loop.first -%}
<|user|>{{ message.content }}<|end|>
{%- else -%}
<|tool|>{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>
{%- endif -%}
"""

# Text that is one token. Longer pieces win; what no piece covers falls back to single characters.
_PIECES = (
    "Wrong result from ", " returns the wrong value", " is broken", "Bug in ",
    "Unexpected result of ", " does not do what it says", "Regression in ",
    " gives a bad answer",
    "\n\n", " gives ", ", expected ", " returns ", " but should return ", "I get ", " for ", "For ",
    " I expect ", ". It gives ", ". It ", " should be ", ", but it is ", "raises ", " raises ",
    "grep -rn -A3 'def ", "sed -i '", "c\\", "' ", "python test_", "submit", "ok", "$ ",
    "def ", "return ", "    return ", "    ", "        ", "):\n", "):",
    ".py", ".py:", ".py-", "-\n",
    "for e in items", " for e in items)", "for i in range(", "items", "total", "fee", "left",
    " if ", " else ", " and ", " or ", "not ", "pass", " in ",
    "max(", "min(", "sum(", "len(", "abs(", "set(", "sorted(", "all(", "any(", "list(", "range(",
    " + ", " - ", " * ", " // ", " % ", " > ", " < ", " >= ", " <= ", " == ", " != ", " = ",
    " += ", " -= ", " *= ", ", ", "[:", ":]", "[-", ", [",
    "True", "False", "None", "TypeError", "IndexError", "NameError", "ValueError", "SyntaxError",
    "IndentationError", "ZeroDivisionError", "UnboundLocalError", "AttributeError",
    "ImportError", "invalid syntax", " was never closed", "unmatched ", "unexpected indent",
    ", line ", "expected ", "unindent does not match any outer indentation level",
    "sed: -e expression #1, char ", "sed: can't read ", "grep: ", ": No such file or directory",
    "python: can't open file ", "unknown command: ", "extra characters after command",
    ": not found", "Traceback (most recent call last):", "README.md", "test_",
)  # fmt: skip


def build_tokenizer() -> Tokenizer:
    """The tokenizer of the generated world.

    Words of the world, syllables of names and numbers below 100 are one token each; everything else
    goes character by character. Decoding gives back exactly the text, but for characters outside
    printable ASCII, which become `?`.
    """
    first, second = "[bdfgklmnprst]", "[aeio]"
    pieces = sorted(
        {*_PIECES, *(f"{verb}_" for verb in VERBS), *MODULE_NAMES},
        key=lambda piece: (-len(piece), piece),
    )
    pattern = "|".join(
        [
            rf"(?<=_){first}{second}(?={first}{second}(?![A-Za-z0-9_]))",
            rf"(?<=_{first}{second}){first}{second}(?![A-Za-z0-9_])",
            r"(?<![0-9])(?:[1-9][0-9]|[0-9])(?![0-9])",
            *map(re.escape, pieces),
            r"[\s\S]",
        ]
    )
    characters = [c for c in string.printable if c in "\n\t" or c.isprintable()]
    numbers = [str(n) for n in range(100)]
    words = dict.fromkeys([*SPECIAL_TOKENS, *SYLLABLES, *numbers, *pieces, *characters])
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?")
    )
    tokenizer.normalizer = normalizers.Replace(Regex(r"[^\x20-\x7e\n\t]"), "?")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


@dataclass(frozen=True)
class Session:
    """What a shell session works on; commands give output and a new session."""

    files: dict[str, str]

    def search(self, function: str) -> str:
        """What `grep -rn -A3 'def <function>'` prints."""
        for path, text in self.files.items():
            lines = text.splitlines()
            for i, line in enumerate(lines):
                if line.startswith(f"def {function}("):
                    shown = enumerate(lines[i : i + 4], start=i + 1)
                    marks = ((":" if n == i + 1 else "-", n, row) for n, row in shown)
                    return "\n".join(f"{path}{mark}{n}{mark}{row}" for mark, n, row in marks)
        return ""

    def replace(self, path: str, number: int, text: str) -> Session:
        r"""The session after `sed -i '<number>c\\<text>' <path>`."""
        lines = self.files[path].split("\n")
        lines[number - 1] = text
        return Session({**self.files, path: "\n".join(lines)})

    def test(self, module: str) -> str:
        """What `python test_<module>.py` prints."""
        files = {name: self.files[name] for name in (f"{module}.py", f"test_{module}.py")}
        try:
            return str(load_modules(files)[f"test_{module}"].first_failure() or "ok")
        except (Exception, StepBudgetExceededError) as error:
            return f"{type(error).__name__}: {error}"


def _functions(text: str) -> list[str]:
    return re.findall(r"^def (\w+)\(", text, re.MULTILINE)


def _random_change(rng: random.Random, source: str) -> tuple[int, str] | None:
    """A line of a function and another text for it: any procedural change, right or wrong."""
    for kind in rng.sample(GRAMMAR_KINDS, len(GRAMMAR_KINDS)):
        changes = [
            change
            for change in mutate(source, kinds=(kind,))
            if change.single_line and 2 <= change.line <= 4
        ]
        if changes:
            change = rng.choice(changes)
            return change.line, change.source.splitlines()[change.line - 1]
    return None


def _definition(text: str, function: str) -> tuple[int, str]:
    """First line number and source of a function."""
    lines = text.split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith(f"def {function}("))
    end = next((i for i in range(start, len(lines)) if not lines[i]), len(lines))
    return start + 1, "\n".join(lines[start:end]) + "\n"


def write_session(rng: random.Random, index: int) -> str:
    """A transcript of somebody looking at functions, changing lines at random and running tests."""
    task = make_task(Split.PRETRAIN, index)
    session = Session(dict(task.files))
    rows = []
    function, path = task.function, task.module
    if rng.random() < 0.5:
        rows.append(task.instruction)
    elif rng.random() < 0.7:
        path = rng.choice([p for p in task.files if p.endswith(".py") and p[:5] != "test_"])
        function = rng.choice(_functions(task.files[path]))
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.8 or len(rows) < 2:
            rows.append(f"$ grep -rn -A3 'def {function}'\n{session.search(function)}")
        first, source = _definition(session.files[path], function)
        change = _random_change(rng, source)
        if change is None:
            break
        number = first + change[0] - 1
        rows.append(f"$ sed -i '{number}c\\{change[1]}' {path}")
        session = session.replace(path, number, change[1])
        if rng.random() < 0.7:
            module = path.removesuffix(".py")
            rows.append(f"$ python test_{path}\n{session.test(module)[:120]}")
    return "\n".join(rows)


def write_document(rng: random.Random, index: int) -> str:
    """Document number `index` of the corpus."""
    if rng.random() < 0.4:
        repository = build_repository(Split.PRETRAIN, index // BUGS_PER_REPOSITORY)
        module = rng.choice(repository.modules)
        return f"$ cat {module.name}.py\n{module.text()}"
    return write_session(rng, index)


def token_stream(tokenizer: Tokenizer, documents: int, seed: int) -> torch.Tensor:
    """The corpus as one sequence of token ids, documents apart by the end-of-text token."""
    rng = random.Random(seed)
    ids: list[int] = []
    for index in range(documents):
        ids += tokenizer.encode(write_document(rng, index), add_special_tokens=False).ids
        ids.append(TEXT_END_ID)
    return torch.tensor(ids, dtype=torch.int16)


OPTIMIZER = OptimizerConfig(kind="muon", learning_rate=3e-3, weight_decay=0.01)
"""Its schedule is that of the recipe, not its own."""


@dataclass(frozen=True)
class Recipe:
    """Sizes and schedule of the pretraining."""

    documents: int = 80_000
    """Size of the corpus, about 105 tokens each."""
    steps: int = 4_000
    batch: int = 12
    window: int = 320
    """Tokens of one training sequence."""
    warmup_steps: int = 50
    decay_from: float = 0.5
    """Share of the run after which both rates fall linearly to zero."""
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    mlp: int = 384


def build_model(recipe: Recipe, vocabulary: int, seed: int) -> Qwen3ForCausalLM:
    """A fresh model: what it adds to its residual stream starts at zero."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_size,
        intermediate_size=recipe.mlp,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=TURN_END_ID,
        pad_token_id=PAD_ID,
    )
    model: Qwen3ForCausalLM = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
            elif "q_norm" in name or "k_norm" in name:
                parameter.fill_(1.5)
            elif "embed" not in name and parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model


def _schedule(recipe: Recipe, step: int) -> float:
    rising = min(1.0, (step + 1) / recipe.warmup_steps)
    falling = (recipe.steps - step) / (recipe.steps * (1 - recipe.decay_from))
    return rising * min(1.0, falling)


def pretrain(
    model: Qwen3ForCausalLM, stream: torch.Tensor, recipe: Recipe, seed: int
) -> Iterator[tuple[int, float]]:
    """Train in place; gives the step and its loss now and then."""
    optimizer = Optimizer(dict(model.named_parameters()), OPTIMIZER)
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(recipe.window + 1)
    for step in range(recipe.steps):
        starts = torch.randint(len(stream) - recipe.window, (recipe.batch, 1), generator=generator)
        rows = stream[starts + offsets].long()
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(_schedule(recipe, step))
        model.zero_grad()
        if step % 100 == 0 or step == recipe.steps - 1:
            yield step, loss.item()


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the folder of a Hugging Face model."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = TURN_END_ID
    model.generation_config.pad_token_id = PAD_ID
    model.generation_config.do_sample = True
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "eos_token": SPECIAL_TOKENS[TURN_END_ID],
        "unk_token": "?",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--documents", type=int, default=Recipe.documents)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recipe = Recipe(steps=arguments.steps, documents=arguments.documents)
    tokenizer = build_tokenizer()
    started = time.monotonic()
    stream = token_stream(tokenizer, recipe.documents, arguments.seed)
    print(f"{len(stream)} tokens of corpus in {time.monotonic() - started:.0f} s", flush=True)
    model = build_model(recipe, tokenizer.get_vocab_size(), arguments.seed)
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    for step, loss in pretrain(model, stream, recipe, arguments.seed):
        print(f"step {step} loss {loss:.4f} {time.monotonic() - started:.0f} s", flush=True)
    save(model, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
