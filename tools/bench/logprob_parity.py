"""Log-probabilities of the embedded engine against the trainer's, in float32 and in float64.

The engine says two turns to each of many issues with the shipped model, up to 64 of them in flight:
answers of different length, so that prompts, first and second turns share steps, and second turns
that begin as soon as the first has ended, from the prefix cache. The trainer scores the same tokens
in packed passes. Differences are of every sampled token, in the float32 that both are told in.

* `DTYPE.max`, `DTYPE.q995`, `DTYPE.above_1e-5`: largest difference in nat, its 99.5 % quantile, and
  the share of tokens above 1e-5, over all rounds.
* `DTYPE.engine_tokens`, `DTYPE.trainer_tokens`: tokens generated, and tokens scored, a CPU-second.

Rounds of the two dtypes alternate, each over tasks of its own. The last line is JSON; spreads are
the lowest and the highest round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from grpo_trainer.backends.base import PolicyAttempt, PolicySequence
from grpo_trainer.backends.torch import TorchBackend
from grpo_trainer.config import TorchConfig
from numpy.typing import NDArray
from rollout_engine.agents.template import ChatTemplate, Message
from rollout_engine.engines.cpu.batch import Sequence
from rollout_engine.engines.cpu.config import CpuEngineConfig
from rollout_engine.engines.cpu.engine import CpuEngine
from rollout_engine.engines.cpu.spec import read_spec
from rollout_engine.engines.cpu.weights import load_weights
from rollout_engine.engines.types import EngineRequest, SamplingParams
from swe_eval.generate import make_task
from tailrace_cli.stack.files import BASE_MODEL

Dtype = Literal["float32", "float64"]
DTYPES: tuple[Dtype, ...] = ("float32", "float64")
SECOND = "again-"


@dataclass(frozen=True)
class Parity:
    """What one round found.

    Attributes:
        differences: [tokens], of engine and trainer.
        reused_tokens: Tokens of first turns that their second ones took from the prefix cache.
        engine_tokens: Generated a CPU-second.
        trainer_tokens: Scored a CPU-second, prompts included.
    """

    differences: NDArray[np.float64]
    reused_tokens: int
    engine_tokens: float
    trainer_tokens: float


def measure(dtype: Dtype, tasks: Iterable[int]) -> Parity:
    """Let the engine speak, and the trainer score what it said."""
    trainer = TorchBackend(Path(BASE_MODEL), TorchConfig(dtype=dtype))
    config = CpuEngineConfig(model=BASE_MODEL, dtype=dtype, context_tokens=1024, seed=1)
    weights = load_weights(BASE_MODEL, read_spec(BASE_MODEL), getattr(torch, dtype))
    engine = CpuEngine(config, weights, time.monotonic)
    began_s = time.process_time()
    turns = speak(engine, tasks)
    spoken_s = time.process_time() - began_s
    attempts = [_attempt(turn) for turn in turns]
    began_s = time.process_time()
    scored = np.concatenate(trainer.logprobs(attempts))
    scored_s = time.process_time() - began_s
    told = np.concatenate([np.array(turn.logprobs, np.float32) for turn in turns])
    return Parity(
        differences=np.abs(told.astype(np.float64) - scored),
        reused_tokens=sum(turn.cached or 0 for turn in turns if _is_second(turn)),
        engine_tokens=len(told) / spoken_s,
        trainer_tokens=sum(attempt.tokens for attempt in attempts) / scored_s,
    )


def speak(engine: CpuEngine, tasks: Iterable[int]) -> list[Sequence]:
    """Give each issue two turns, and return all turns in the order of their ends."""
    template = ChatTemplate.from_folder(Path(BASE_MODEL))
    for number in tasks:
        issue = Message("user", make_task("train", number).instruction)
        _submit(engine, str(number), template.prompt([issue]).tolist(), 20 + 7 * (number % 8))
    turns: list[Sequence] = []
    while engine.busy:
        for turn in engine.step():
            turns.append(turn)
            if _is_second(turn):
                continue
            rid = turn.request.rid
            closed = turn.output[-1] == template.end_of_turn_id
            output = Message("user", f"exit code {rid}\n" * (1 + int(rid) % 5))
            more = template.continuation([output], closed=closed).tolist()
            _submit(engine, SECOND + rid, turn.tokens + more, 12 + 9 * (int(rid) % 5))
    return turns


def _submit(engine: CpuEngine, rid: str, prompt: list[int], new_tokens: int) -> None:
    sampling = SamplingParams(max_new_tokens=new_tokens)
    engine.submit(EngineRequest(rid=rid, input_ids=prompt, sampling=sampling))


def _is_second(turn: Sequence) -> bool:
    return turn.request.rid.startswith(SECOND)


def _attempt(turn: Sequence) -> PolicyAttempt:
    ids = np.array(turn.tokens, np.int32)
    trained = np.arange(len(ids)) >= turn.prompt_tokens
    return PolicyAttempt((PolicySequence(ids, trained, np.zeros(len(ids), np.float32)),))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=200, help="issues of a round")
    arguments = parser.parse_args()
    rounds: dict[Dtype, list[Parity]] = {dtype: [] for dtype in DTYPES}
    loads = [os.getloadavg()[0]]
    for number in range(arguments.rounds):
        tasks = range(number * arguments.tasks, (number + 1) * arguments.tasks)
        for dtype in DTYPES:
            rounds[dtype].append(measure(dtype, tasks))
        loads.append(os.getloadavg()[0])
    figures: dict[str, float] = {}
    spread: dict[str, list[float]] = {}
    for dtype, found in rounds.items():
        differences = np.concatenate([parity.differences for parity in found])
        figures |= {
            f"{dtype}.tokens": len(differences),
            f"{dtype}.max": float(f"{differences.max():.3g}"),
            f"{dtype}.q995": float(f"{np.quantile(differences, 0.995):.3g}"),
            f"{dtype}.above_1e-5": float(f"{np.mean(differences > 1e-5):.3g}"),
        }
        for name in ("engine_tokens", "trainer_tokens"):
            speeds = [round(getattr(parity, name)) for parity in found]
            figures[f"{dtype}.{name}"] = statistics.median(speeds)
            spread[f"{dtype}.{name}"] = [min(speeds), max(speeds)]
    result = {
        "figures": figures,
        "spread": spread,
        "runs": arguments.rounds,
        "load_avg": round(max(loads), 2),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
