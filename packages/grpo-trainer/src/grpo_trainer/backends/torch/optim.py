"""AdamW and Muon over named tensors, with a state that is a plain mapping of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from grpo_trainer.config import OptimizerConfig

STEPS = "steps"

# Coefficients of the quintic Newton-Schulz iteration; they drive singular values towards 1 fast,
# and need not bring them there exactly.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


class Optimizer:
    """Updates parameters in place from their gradients.

    With `muon`, matrices other than embeddings and the output head get orthogonalised momentum,
    and everything else AdamW. Weight decay is decoupled and falls on matrices alone.
    """

    def __init__(self, parameters: Mapping[str, Tensor], config: OptimizerConfig) -> None:
        self._parameters = dict(parameters)
        self._config = config
        self._steps = 0
        self._momentum: dict[str, Tensor] = {}
        self._first: dict[str, Tensor] = {}
        self._second: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if config.kind == "muon" and orthogonalised(name, parameter):
                self._momentum[name] = torch.zeros_like(parameter)
            else:
                self._first[name] = torch.zeros_like(parameter)
                self._second[name] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Do one update at `scale` times the peak learning rates. Gradients must be there."""
        self._steps += 1
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            if name in self._momentum:
                self._muon(name, parameter, parameter.grad, scale)
            else:
                self._adamw(name, parameter, parameter.grad, scale)

    def state(self) -> dict[str, Tensor]:
        """Return the state by name, for writing. The tensors are the optimizer's own."""
        state = {STEPS: torch.tensor([self._steps], dtype=torch.int64)}
        for kind, tensors in self._slots().items():
            state |= {f"{kind}.{name}": tensor for name, tensor in tensors.items()}
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take a state that `state` returned.

        Raises:
            ValueError: It is of another model or another kind of optimizer.
        """
        expected = set(self.state())
        if set(state) != expected:
            differing = sorted(expected ^ set(state))
            raise ValueError(
                f"the optimizer's state has other tensors than expected, such as {differing[:3]}"
            )
        self._steps = int(state[STEPS][0])
        for kind, tensors in self._slots().items():
            for name, tensor in tensors.items():
                tensor.copy_(state[f"{kind}.{name}"])

    def _slots(self) -> dict[str, dict[str, Tensor]]:
        return {"momentum": self._momentum, "first": self._first, "second": self._second}

    def _adamw(self, name: str, parameter: Tensor, grad: Tensor, scale: float) -> None:
        config = self._config
        rate = config.learning_rate * scale
        first, second = self._first[name], self._second[name]
        if config.weight_decay and parameter.ndim > 1:
            parameter.mul_(1 - rate * config.weight_decay)
        first.lerp_(grad, 1 - config.beta1)
        second.mul_(config.beta2).addcmul_(grad, grad, value=1 - config.beta2)
        correction = math.sqrt(1 - config.beta2**self._steps)
        spread = second.sqrt().div_(correction).add_(config.epsilon)
        parameter.addcdiv_(first, spread, value=-rate / (1 - config.beta1**self._steps))

    def _muon(self, name: str, parameter: Tensor, grad: Tensor, scale: float) -> None:
        config = self._config
        rate = config.muon_learning_rate * scale
        momentum = self._momentum[name]
        momentum.mul_(config.muon_momentum).add_(grad)
        update = orthogonalise(grad.add(momentum, alpha=config.muon_momentum))
        if config.weight_decay:
            parameter.mul_(1 - rate * config.weight_decay)
        rows, columns = parameter.shape
        parameter.add_(update, alpha=-rate * max(1.0, rows / columns) ** 0.5)


def orthogonalised(name: str, parameter: Tensor) -> bool:
    """Say whether Muon updates this parameter by orthogonalised momentum."""
    return parameter.ndim == 2 and "embed" not in name and not name.startswith("lm_head")


def orthogonalise(matrix: Tensor) -> Tensor:
    """Bring a matrix's singular values near 1, keeping its singular vectors."""
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.t() if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.t()
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.t() if tall else x
