"""Two tiny checkpoints of one architecture, with random weights and a tokenizer of bytes.

Usage: python tools/sglang_cpu/tiny_models.py FOLDER     (writes FOLDER/a and FOLDER/b; needs torch)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

VOCAB = 512
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def main() -> int:
    import torch
    import transformers

    for seed, name in enumerate("ab"):
        folder = Path(sys.argv[1]) / name
        torch.manual_seed(seed)
        config = transformers.Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            eos_token_id=258,
            pad_token_id=256,
        )
        model: Any = transformers.Qwen3ForCausalLM
        model(config).to(torch.bfloat16).save_pretrained(folder)
        _tokenizer(folder)
    return 0


def _tokenizer(folder: Path) -> None:
    """Write a tokenizer of 256 bytes and the special tokens, filled up to the vocabulary."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.add_tokens([f"<t{n}>" for n in range(len(alphabet) + len(SPECIALS), VOCAB)])
    fast: Any = transformers.PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, eos_token=SPECIALS[2], pad_token=SPECIALS[0]).save_pretrained(
        folder
    )


if __name__ == "__main__":
    sys.exit(main())
