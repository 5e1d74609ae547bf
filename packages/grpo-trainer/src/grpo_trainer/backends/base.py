"""The protocol between a stage and what computes its updates.

A back-end holds the weights and the optimizer. It is called from one thread, one call at a time;
calls block. It knows nothing of groups, versions or checkpoints' manifests, and draws no random
numbers: the same calls give the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from weight_sync.publisher import TensorLike

from grpo_trainer.config import OptimizerConfig, PolicyLossConfig

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class PolicySequence:
    """One root-to-leaf sequence of an attempt.

    Attributes:
        token_ids: int32 [n].
        trained: bool [n], tokens whose log-probability the loss is about; never the first.
        behaviour: float32 [n], log-probabilities as sampled; read where `trained`.
    """

    token_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    behaviour: Floats


@dataclass(frozen=True, slots=True, eq=False)
class PolicyAttempt:
    """What a policy update learns from one attempt.

    An attempt with branches has several sequences; a token that two of them share is `trained` in
    one of them only, so each sampled token counts once.
    """

    sequences: tuple[PolicySequence, ...]
    advantage: float = 0.0
    temperature: float = 1.0

    @property
    def tokens(self) -> int:
        """Tokens to compute."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @property
    def trained_tokens(self) -> int:
        """Tokens the loss is about."""
        return sum(int(np.count_nonzero(sequence.trained)) for sequence in self.sequences)

    @property
    def behaviour(self) -> Floats:
        """Log-probabilities of the trained tokens as sampled, float32 [trained tokens]."""
        return np.concatenate([s.behaviour[s.trained] for s in self.sequences])


@dataclass(frozen=True, slots=True, eq=False)
class WeightedSequence:
    """A sequence for supervised training.

    Attributes:
        token_ids: int32 [n].
        weights: float32 [n], what predicting each token weighs; the first is never predicted.
        assistant: bool [n], what the assistant wrote.
    """

    token_ids: NDArray[np.int32]
    weights: Floats
    assistant: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a back-end trains."""

    architecture: str
    parameters: int
    vocabulary: int
    context_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class UpdateResult:
    """What one optimizer update did.

    Attributes:
        applied: Whether the weights changed; a refused update leaves them and the optimizer alone.
        nonfinite: How many values of log-probabilities, loss or gradients were not finite.
        loss: The loss before the update.
        grad_norm: Norm of the gradient before clipping.
        tokens: Tokens computed.
        trained_tokens: Tokens the loss was about.
        values: More figures by name, means over the trained tokens.
        logprobs: For a policy update, log-probabilities of each attempt's trained tokens under the
            weights before the update, float32 [trained tokens] each.
    """

    applied: bool
    nonfinite: int
    loss: float
    grad_norm: float
    tokens: int
    trained_tokens: int
    values: Mapping[str, float] = field(default_factory=dict)
    logprobs: tuple[Floats, ...] = ()


class TrainerBackend(Protocol):
    """Weights, optimizer, and the two updates."""

    @property
    def info(self) -> ModelInfo:
        """What is trained."""
        ...

    def start_optimizer(self, config: OptimizerConfig) -> None:
        """Begin a stage: a fresh optimizer over the weights held now."""
        ...

    def keep_reference(self) -> None:
        """Keep a copy of the weights held now as the reference policy."""
        ...

    def logprobs(
        self, attempts: Sequence[PolicyAttempt], *, reference: bool = False
    ) -> tuple[Floats, ...]:
        """Score each attempt's trained tokens under the weights held now, or the reference's.

        Returns:
            float32 [trained tokens] for each attempt, in the order of its sequences.
        """
        ...

    def policy_update(
        self,
        attempts: Sequence[PolicyAttempt],
        loss: PolicyLossConfig,
        *,
        proximal: Sequence[Floats] | None = None,
        reference: Sequence[Floats] | None = None,
        scale: float = 1.0,
    ) -> UpdateResult:
        """Do one optimizer update on a minibatch of attempts.

        Args:
            attempts: The minibatch.
            loss: What is minimised.
            proximal: Log-probabilities under the weights at the start of the step, for each
                attempt; None: those weights are held now, so the update's own are taken.
            reference: Log-probabilities of the reference policy, for the KL term.
            scale: What the learning rate is multiplied by.
        """
        ...

    def supervised_update(
        self, sequences: Sequence[WeightedSequence], *, scale: float = 1.0
    ) -> UpdateResult:
        """Do one optimizer update on the weighted mean of the tokens' cross-entropies."""
        ...

    def weights(self) -> Mapping[str, TensorLike]:
        """Copy the weights, by the names and in the dtypes of the model folder."""
        ...

    def weights_of(self, folder: Path) -> Mapping[str, TensorLike]:
        """Read the weights of a model folder or checkpoint, as `weights` gives those held."""
        ...

    def save(self, folder: Path) -> None:
        """Write a complete model folder and the optimizer's state into an empty folder."""
        ...

    def load(self, folder: Path, *, optimizer: OptimizerConfig | None) -> None:
        """Take the weights of a model folder or checkpoint.

        Args:
            folder: Of the same architecture.
            optimizer: Take the optimizer's state that `save` wrote too; None: hold no optimizer.
        """
        ...
