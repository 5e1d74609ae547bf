"""A game of a few tokens that a policy can learn in seconds, played with real weights.

The prompt is one token that names the task. The policy samples a few tokens; the attempt is solved
if the first of them is among the lucky ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rollout_engine.types import (
    Assignment,
    Attempt,
    AttemptId,
    AttemptTiming,
    FinishedGroup,
    Outcome,
    Segment,
    VersionSpan,
)
from torch import Tensor
from weight_sync.publisher import TensorLike

from grpo_trainer.backends.torch import qwen3
from grpo_trainer.backends.torch.packing import pack

FIRST_TASK_TOKEN = 10
TASKS = tuple(f"task-{index}" for index in range(8))


@dataclass(frozen=True, slots=True)
class TokenGame:
    """Plays attempts with given weights; the same assignment and weights give the same tokens.

    Attributes:
        model: Folder with the model's config.json.
        turns: Tokens that the policy samples.
        lucky: Every so many-th token is a lucky one.
    """

    model: Path
    turns: int = 3
    lucky: int = 3

    def play(
        self, assignment: Assignment, weights: Mapping[str, TensorLike], version: int
    ) -> FinishedGroup:
        """Play a group; its cursor is 0."""
        shape = qwen3.Qwen3Shape.from_folder(self.model)
        tensors = {name: torch.from_numpy(np.asarray(value)) for name, value in weights.items()}
        task_token = FIRST_TASK_TOKEN + TASKS.index(assignment.task_id)
        ordinal = int(assignment.key.group_id.rsplit("-", 1)[-1])
        generator = np.random.default_rng([assignment.sampling.seed, ordinal])
        ids = np.full((assignment.attempts, 1), task_token, np.int32)
        logprobs = np.zeros((assignment.attempts, 1), np.float32)
        for _ in range(self.turns):
            logs = _next_logs(shape, tensors, ids)
            chosen = _sample(logs, generator.random(assignment.attempts))
            ids = np.concatenate([ids, chosen[:, None]], axis=1)
            picked = logs[np.arange(len(chosen)), chosen]
            logprobs = np.concatenate([logprobs, picked[:, None]], axis=1)
        attempts = tuple(
            self._attempt(assignment, index, ids[index], logprobs[index], version)
            for index in range(assignment.attempts)
        )
        return FinishedGroup(assignment.key, assignment.task_id, 0, attempts)

    def _attempt(
        self,
        assignment: Assignment,
        index: int,
        ids: np.ndarray[tuple[int], np.dtype[np.int32]],
        logprobs: np.ndarray[tuple[int], np.dtype[np.float32]],
        version: int,
    ) -> Attempt:
        solved = int(ids[1]) % self.lucky == 0
        mask = np.arange(len(ids)) > 0
        span = VersionSpan(1, len(ids), version, version)
        return Attempt(
            id=AttemptId(assignment.key, index),
            task_id=assignment.task_id,
            outcome=Outcome.SOLVED if solved else Outcome.UNSOLVED,
            reward=float(solved),
            graded=True,
            turns=self.turns,
            segments=(Segment(0, -1, ids, mask, logprobs, (span,), assignment.sampling),),
            timing=AttemptTiming(total_s=0.5 + index / 10),
            traceparent=assignment.traceparent,
        )


@torch.no_grad()
def _next_logs(
    shape: qwen3.Qwen3Shape,
    weights: Mapping[str, Tensor],
    ids: np.ndarray[tuple[int, int], np.dtype[np.int32]],
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    packed = pack(list(ids), torch.device("cpu"))
    length = ids.shape[1]
    last = torch.arange(length - 1, ids.size, length)
    hidden = qwen3.hidden_states(shape, weights, packed, last)
    logs: Tensor = (hidden @ qwen3.output_weight(shape, weights).t()).log_softmax(-1)
    return logs.numpy()


def _sample(
    logs: np.ndarray[tuple[int, int], np.dtype[np.float32]],
    draws: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    cumulative = np.exp(logs.astype(np.float64)).cumsum(axis=1)
    scaled = draws[:, None] * cumulative[:, -1:]
    chosen: np.ndarray[tuple[int], np.dtype[np.int32]] = (cumulative < scaled).sum(
        axis=1, dtype=np.int32
    )
    return chosen
