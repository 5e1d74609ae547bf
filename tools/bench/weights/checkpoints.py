"""Consecutive bf16 checkpoints of a short training run: the demo's base model, fine-tuning rates.

    python tools/bench/weights/checkpoints.py --out FOLDER --learning-rate 1e-5

The torch back-end trains fp32 masters by AdamW, first a while by SFT on documents of the world that
the model was pretrained in, then by GRPO on groups of such documents, whose rewards are drawn at
random: what is measured is how weights move, not where to. Written is each of the last steps of
both, cast to bf16. 0.84 M parameters, some CPU-seconds.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.weights.bf16 import Bits, to_bf16
from bench.weights.rivals import model_of
from grpo_trainer.backends.base import PolicyAttempt, PolicySequence, WeightedSequence
from grpo_trainer.backends.torch.backend import TorchBackend
from grpo_trainer.config import OptimizerConfig, PolicyLossConfig, TorchConfig
from pretrain_base import build_tokenizer, write_document
from weight_sync.codecs import Dense

ROOT = Path(__file__).resolve().parents[3]
BASE = ROOT / "packages/tailrace/src/tailrace_cli/demo/base"
STEPS = 24
"""Of each kind of training. By then a fresh Adam's first steps, which change most, are past."""
KEPT = 5
"""Of the last steps of each kind, unless asked for more."""

_BATCH = 8
_TOKENS = 256
_GROUP = 4


def checkpoints(
    learning_rate: float, seed: int = 0, longer: int = 0
) -> Iterator[list[dict[str, Bits]]]:
    """Yield consecutive checkpoints, bits by tensor: some of the SFT, then some of the GRPO.

    `longer` trains, and keeps, so many steps more of each.
    """
    rng = random.Random(seed)
    tokenizer = build_tokenizer()
    documents = [
        np.array(tokenizer.encode(write_document(rng, index)).ids[:_TOKENS], np.int32)
        for index in range(_BATCH * 8)
    ]
    backend = TorchBackend(BASE, TorchConfig(threads=1))
    backend.start_optimizer(OptimizerConfig(learning_rate=learning_rate))
    for update in (_supervised, _policy):
        kept = []
        for step in range(STEPS + longer):
            update(backend, rng.sample(documents, _BATCH), rng)
            if step >= STEPS - KEPT:
                weights = backend.weights()
                kept.append({name: to_bf16(np.array(w).reshape(-1)) for name, w in weights.items()})
        yield kept


def _supervised(
    backend: TorchBackend, documents: list[np.ndarray[tuple[int], np.dtype[np.int32]]], _: object
) -> None:
    backend.supervised_update(
        [
            WeightedSequence(ids, np.ones(len(ids), np.float32), np.ones(len(ids), np.bool_))
            for ids in documents
        ]
    )


def _policy(
    backend: TorchBackend,
    documents: list[np.ndarray[tuple[int], np.dtype[np.int32]]],
    rng: random.Random,
) -> None:
    rewards = np.array([float(rng.random() < 0.5) for _ in documents]).reshape(-1, _GROUP)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    advantages = (centred / (rewards.std(axis=1, keepdims=True) + 1e-6)).reshape(-1)
    attempts = []
    for ids, advantage in zip(documents, advantages, strict=True):
        trained = np.arange(len(ids)) > 0
        silent = PolicySequence(ids, trained, np.zeros(len(ids), np.float32))
        (sampled,) = backend.logprobs([PolicyAttempt((silent,))])
        behaviour = np.zeros(len(ids), np.float32)
        behaviour[trained] = sampled
        attempts.append(PolicyAttempt((PolicySequence(ids, trained, behaviour),), float(advantage)))
    backend.policy_update(attempts, PolicyLossConfig())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for kind, kept in zip(
        ("sft", "grpo"), checkpoints(arguments.learning_rate, arguments.seed), strict=True
    ):
        for index, weights in enumerate(kept):
            tensors = list(model_of(weights).values())
            path = arguments.out / f"{kind}-{STEPS - KEPT + index + 1:03d}.safetensors"
            path.write_bytes(b"".join(Dense().encode(tensors)))
            print(path)


if __name__ == "__main__":
    main()
