"""Trajectories as the token sequences that the agent loop would have produced."""

from __future__ import annotations

import numpy as np
from rollout_engine.agents.template import ChatTemplate

from grpo_trainer.backends.base import WeightedSequence
from grpo_trainer.sft.traces import Trace


def render(
    trace: Trace,
    template: ChatTemplate,
    *,
    observation_weight: float,
    prompt_weight: float,
) -> WeightedSequence:
    """Tokenise a trajectory and weigh its tokens.

    What the assistant wrote weighs 1, its end-of-turn token included.

    Args:
        trace: The trajectory.
        template: Of the model; the rollout engine's own.
        observation_weight: What a token between turns weighs.
        prompt_weight: What a token before the first turn weighs.
    """
    turns = [(turn.text, turn.observations) for turn in trace.turns]
    rendered = template.conversation(trace.opening, turns)
    assistant = rendered.loss_mask
    weights = np.where(assistant, np.float32(1), np.float32(observation_weight))
    first = int(np.argmax(assistant))
    weights[:first] = prompt_weight
    return WeightedSequence(rendered.token_ids, weights.astype(np.float32), assistant)
