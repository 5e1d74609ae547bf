"""A minibatch of attempts as micro-batches that are ready to compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grpo_trainer.backends.base import Floats, PolicyAttempt
from grpo_trainer.backends.torch.packing import Packed, pack
from grpo_trainer.core.batching import micro_batches


@dataclass(frozen=True, slots=True, eq=False)
class PolicyPass:
    """One micro-batch.

    Attributes:
        packed: The sequences of the attempts, in order.
        sources: int64 [trained], packed index of the token before each trained one.
        targets: int64 [trained], the trained tokens.
        attempt: int64 [trained], index of the attempt within the pass.
        members: Index of each of the pass's attempts in the minibatch.
        lengths: Trained tokens of each of them.
    """

    packed: Packed
    sources: Tensor
    targets: Tensor
    attempt: Tensor
    members: tuple[int, ...]
    lengths: tuple[int, ...]

    def gather(self, per_attempt: Sequence[Floats]) -> Tensor:
        """Lay arrays of trained tokens, one for each attempt of the minibatch, out for this pass.

        Returns:
            float [trained].
        """
        joined = np.concatenate([per_attempt[member] for member in self.members])
        return torch.from_numpy(joined).to(self.sources.device)

    def scatter(self, per_token: Tensor) -> dict[int, Floats]:
        """Split values of this pass's trained tokens by attempt of the minibatch."""
        flat = per_token.detach().float().cpu().numpy()
        ends = np.cumsum(self.lengths)[:-1]
        parts = np.split(flat, ends)
        return {member: part.copy() for member, part in zip(self.members, parts, strict=True)}


def policy_passes(
    attempts: Sequence[PolicyAttempt], *, max_tokens: int, device: torch.device
) -> Iterator[PolicyPass]:
    """Cut a minibatch into passes of at most `max_tokens`; an attempt is never split."""
    for attempt in attempts:
        for sequence in attempt.sequences:
            if len(sequence.trained) and sequence.trained[0]:
                raise ValueError("the first token of a sequence has no prediction to train")
    tokens = [attempt.tokens for attempt in attempts]
    for members in micro_batches(tokens, max_tokens=max_tokens):
        sequences = [s for member in members for s in attempts[member].sequences]
        packed = pack([sequence.token_ids for sequence in sequences], device)
        at = np.flatnonzero(np.concatenate([sequence.trained for sequence in sequences]))
        lengths = [attempts[member].trained_tokens for member in members]
        index = torch.from_numpy(at).to(device)
        yield PolicyPass(
            packed=packed,
            sources=index - 1,
            targets=packed.token_ids[index],
            attempt=torch.from_numpy(np.repeat(np.arange(len(members)), lengths)).to(device),
            members=tuple(members),
            lengths=tuple(lengths),
        )
