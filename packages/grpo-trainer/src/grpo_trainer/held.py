"""The weights that the back-end holds, and whose they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from weight_sync.publisher import TensorLike

from grpo_trainer.backends.base import TrainerBackend
from grpo_trainer.checkpoint import Checkpoint
from grpo_trainer.config import OptimizerConfig
from grpo_trainer.registry import BASE, RunRegistry
from grpo_trainer.stage import Compute, PolicyState


class HeldWeights:
    """Loads the newest checkpoint of one stage or another into the back-end.

    Args:
        backend: What holds them; `base` is loaded in it.
        registry: Where the stages' checkpoints are.
        compute: Where the back-end is called.
        base: Model folder that the run began with.

    Attributes:
        policy: Of the weights held now.
        known_number: Highest version number that anyone in the run has seen.
    """

    def __init__(
        self, backend: TrainerBackend, registry: RunRegistry, compute: Compute, base: Path
    ) -> None:
        self.backend = backend
        self.policy = PolicyState()
        self.known_number = 0
        self._registry = registry
        self._compute = compute
        self._base = base
        self._name: str | None = BASE

    @property
    def name(self) -> str | None:
        """Stage whose weights are held, or `BASE`; None while they are of no checkpoint."""
        return self._name

    def moved(self, name: str | None) -> None:
        """Note that the weights held became those of another stage's newest checkpoint, or none's.

        None also makes the next `hold` load them anew.
        """
        self._name = name

    async def hold(self, name: str) -> None:
        """Load a stage's newest weights, or the base model's, unless they are held.

        Raises:
            CheckpointInvalid: There is no checkpoint, or it is not whole.
        """
        if name == self._name:
            return
        if name == BASE:
            await self._compute(lambda: self.backend.load(self._base, optimizer=None))
            self._take(BASE, PolicyState())
            return
        checkpoint = await self._read(name)
        await self._compute(lambda: self.backend.load(checkpoint.folder, optimizer=None))
        self._take(name, PolicyState.from_json(checkpoint.state["policy"]))

    async def resume(self, name: str, optimizer: OptimizerConfig) -> Checkpoint:
        """Load a stage's newest checkpoint with its optimizer.

        Raises:
            CheckpointInvalid: There is no checkpoint, it is not whole, or of another optimizer.
        """
        checkpoint = await self._read(name)
        self._name = None
        await self._compute(lambda: self.backend.load(checkpoint.folder, optimizer=optimizer))
        self._take(name, PolicyState.from_json(checkpoint.state["policy"]))
        return checkpoint

    async def tensors(self) -> Mapping[str, TensorLike]:
        """Copy the weights held now."""
        copied: Mapping[str, TensorLike] = await self._compute(self.backend.weights)
        return copied

    async def tensors_of(self, name: str) -> tuple[Mapping[str, TensorLike], PolicyState]:
        """Read a stage's newest weights, or the base model's, and leave those held alone.

        Raises:
            CheckpointInvalid: There is no checkpoint, or it is not whole.
        """
        folder, policy = self._base, PolicyState()
        if name != BASE:
            checkpoint = await self._read(name)
            folder = checkpoint.folder
            policy = PolicyState.from_json(checkpoint.state["policy"])
        tensors: Mapping[str, TensorLike] = await self._compute(
            lambda: self.backend.weights_of(folder)
        )
        return tensors, policy

    async def _read(self, name: str) -> Checkpoint:
        checkpoint: Checkpoint = await self._compute(
            lambda: self._registry.checkpoints(name).read_newest()
        )
        return checkpoint

    def _take(self, name: str, policy: PolicyState) -> None:
        self._name = name
        self.policy = policy
        self.known_number = max(self.known_number, policy.known_number)
