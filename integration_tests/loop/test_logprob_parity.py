"""Engine and trainer score an agent's tokens the same: decode steps against one pass.

Both compute in float32, which is good for about 1e-6 here, and for 2e-5 on the worst token of some
thousands (transformers against float64, too).
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from grpo_trainer.backends.base import PolicyAttempt, PolicySequence
from grpo_trainer.backends.torch import TorchBackend
from grpo_trainer.config import TorchConfig
from rollout_engine.agents.template import ChatTemplate, Message
from rollout_engine.engines.cpu.batch import Sequence
from rollout_engine.engines.cpu.config import CpuEngineConfig
from rollout_engine.engines.cpu.engine import CpuEngine
from rollout_engine.engines.cpu.spec import read_spec
from rollout_engine.engines.cpu.weights import load_weights
from rollout_engine.engines.types import EngineRequest, SamplingParams
from swe_eval.generate import make_task
from tailrace_cli.stack.files import BASE_MODEL

TASKS = 150


@pytest.fixture(scope="module")
def answers() -> list[Sequence]:
    """What the shipped model says first to issues, up to 64 of them in flight."""
    config = CpuEngineConfig(model=BASE_MODEL, context_tokens=512, seed=1)
    engine = CpuEngine(config, load_weights(BASE_MODEL, read_spec(BASE_MODEL)), time.monotonic)
    template = ChatTemplate.from_folder(Path(BASE_MODEL))
    for number in range(TASKS):
        issue = Message("user", make_task("train", number).instruction)
        request = EngineRequest(
            rid=str(number),
            input_ids=list(template.prompt([issue])),
            sampling=SamplingParams(max_new_tokens=40),
        )
        engine.submit(request)
    finished: list[Sequence] = []
    with torch.inference_mode():
        while engine.busy:
            finished += engine.step()
    return finished


def test_log_probabilities_are_the_trainers(answers: list[Sequence]) -> None:
    attempts = []
    for answer in answers:
        ids = np.array(answer.tokens[: answer.prompt_tokens] + answer.output, np.int32)
        trained = np.arange(len(ids)) >= answer.prompt_tokens
        sequence = PolicySequence(ids, trained, np.zeros(len(ids), np.float32))
        attempts.append(PolicyAttempt((sequence,)))
    scored = np.concatenate(TorchBackend(BASE_MODEL, TorchConfig()).logprobs(attempts))
    told = np.concatenate([np.array(answer.logprobs) for answer in answers])
    off = np.abs(told - scored)
    assert len(off) > 10 * TASKS
    assert np.quantile(off, 0.995) < 1e-5
    assert off.max() < 5e-5
