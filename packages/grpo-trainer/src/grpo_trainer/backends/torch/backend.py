"""The torch back-end: one process, one device, whole sequences packed into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from weight_sync.publisher import TensorLike

from grpo_trainer.backends.base import (
    Floats,
    ModelInfo,
    PolicyAttempt,
    UpdateResult,
    WeightedSequence,
)
from grpo_trainer.backends.torch import qwen3
from grpo_trainer.backends.torch.folder import (
    WEIGHTS_FILE,
    published,
    read_companions,
    read_model,
    read_tensors,
)
from grpo_trainer.backends.torch.optim import Optimizer
from grpo_trainer.backends.torch.packing import pack
from grpo_trainer.backends.torch.passes import PolicyPass, policy_passes
from grpo_trainer.config import OptimizerConfig, PolicyLossConfig, TorchConfig
from grpo_trainer.core.batching import micro_batches
from grpo_trainer.errors import CheckpointInvalid
from grpo_trainer.losses import (
    attempt_weights,
    behaviour_correction,
    kl_to_reference,
    policy_loss,
    token_logprobs,
)

OPTIMIZER_FILE = "optimizer.safetensors"
REFERENCE_FILE = "reference.safetensors"


@dataclass(slots=True)
class _Sums:
    """What accumulates over micro-batches."""

    loss: float = 0.0
    nonfinite: int = 0
    totals: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, values: Tensor) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + float(values.detach().double().sum())

    def peak(self, name: str, values: Tensor) -> None:
        if values.numel():
            found = float(values.detach().max())
            self.peaks[name] = max(found, self.peaks.get(name, found))


class TorchBackend:
    """Trains Qwen3 and Qwen3-MoE in float32 or float64, as `config.dtype` says.

    Weights, gradients and optimizer are held in that dtype, and `save` writes them in it. Weights
    go out in the model folder's own dtypes, scores as float32.

    Args:
        model: A Hugging Face model folder.
        config: Threads, device, sizes of passes.

    Raises:
        ModelError: The folder is missing, incomplete, or of another architecture.
    """

    def __init__(self, model: Path, config: TorchConfig | None = None) -> None:
        self._config = config or TorchConfig()
        torch.set_num_threads(self._config.threads)
        self._device = torch.device(self._config.device)
        self._dtype: torch.dtype = getattr(torch, self._config.dtype)
        self._shape = qwen3.Qwen3Shape.from_folder(model)
        self._companions = read_companions(model)
        tensors = read_model(model, qwen3.parameter_shapes(self._shape))
        self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        self._weights = {
            name: tensor.to(self._device, self._dtype, copy=True).requires_grad_()
            for name, tensor in tensors.items()
        }
        self._clip = 0.0
        self._optimizer: Optimizer | None = None
        self._reference: dict[str, Tensor] | None = None

    @property
    def info(self) -> ModelInfo:
        """What is trained."""
        return ModelInfo(
            architecture=qwen3.ARCHITECTURES[self._shape.model_type],
            parameters=sum(tensor.numel() for tensor in self._weights.values()),
            vocabulary=self._shape.vocabulary,
            context_tokens=self._shape.context_tokens,
        )

    def start_optimizer(self, config: OptimizerConfig) -> None:
        """Begin a stage: a fresh optimizer over the weights held now."""
        self._optimizer = Optimizer(self._weights, config)
        self._clip = config.gradient_clip

    def keep_reference(self) -> None:
        """Keep a copy of the weights held now as the reference policy."""
        self._reference = {name: t.detach().clone() for name, t in self._weights.items()}

    @torch.no_grad()
    def logprobs(
        self, attempts: Sequence[PolicyAttempt], *, reference: bool = False
    ) -> tuple[Floats, ...]:
        """Score each attempt's trained tokens under the weights held now, or the reference's."""
        weights: Mapping[str, Tensor] = self._weights
        if reference:
            if self._reference is None:
                raise RuntimeError("no reference policy is kept; call keep_reference first")
            weights = self._reference
        temperature = _temperature(attempts)
        found: dict[int, Floats] = {}
        for part in self._passes(attempts):
            scored, _ = self._score(weights, part, temperature)
            found |= part.scatter(scored)
        return tuple(found[index] for index in range(len(attempts)))

    def policy_update(
        self,
        attempts: Sequence[PolicyAttempt],
        loss: PolicyLossConfig,
        *,
        proximal: Sequence[Floats] | None = None,
        reference: Sequence[Floats] | None = None,
        scale: float = 1.0,
    ) -> UpdateResult:
        """Do one optimizer update on a minibatch of attempts."""
        counts = torch.tensor([attempt.trained_tokens for attempt in attempts], dtype=torch.int64)
        weights = attempt_weights(
            counts, loss.aggregation, fixed_length=loss.fixed_length, dtype=self._dtype
        )
        temperature = _temperature(attempts)
        behaviour = [attempt.behaviour for attempt in attempts]
        advantages = torch.tensor([attempt.advantage for attempt in attempts], dtype=self._dtype)
        sums = _Sums()
        scored: dict[int, Floats] = {}
        for part in self._passes(attempts):
            current, entropy = self._score(self._weights, part, temperature)
            scored |= part.scatter(current)
            members = torch.tensor(part.members)
            per_token = _policy_terms(
                loss,
                part,
                current,
                entropy,
                advantage=advantages[members].to(self._device)[part.attempt],
                behaviour=part.gather(behaviour),
                proximal=current.detach() if proximal is None else part.gather(proximal),
                reference=None if reference is None else part.gather(reference),
                sums=sums,
            )
            total = (per_token * weights[members].to(self._device)[part.attempt]).sum()
            sums.loss += float(total.detach())
            sums.nonfinite += _nonfinite(current) + _nonfinite(per_token)
            torch.autograd.backward(total)
        trained = int(counts.sum())
        result = self._finish(
            sums, scale, tokens=sum(attempt.tokens for attempt in attempts), trained_tokens=trained
        )
        values = {name: total / max(1, trained) for name, total in sums.totals.items()}
        return replace(
            result,
            values=values | sums.peaks,
            logprobs=tuple(scored[index] for index in range(len(attempts))),
        )

    def supervised_update(
        self, sequences: Sequence[WeightedSequence], *, scale: float = 1.0
    ) -> UpdateResult:
        """Do one optimizer update on the weighted mean of the tokens' cross-entropies."""
        total_weight = float(sum(s.weights[1:].sum(dtype=np.float64) for s in sequences))
        if total_weight <= 0:
            raise ValueError("no token of the batch has a weight above 0")
        sums = _Sums()
        lengths = [len(sequence.token_ids) for sequence in sequences]
        trained = 0
        for indices in micro_batches(lengths, max_tokens=self._config.micro_batch_tokens):
            chosen = [sequences[index] for index in indices]
            packed = pack([sequence.token_ids for sequence in chosen], self._device)
            weights = np.concatenate([np.r_[np.float32(0), s.weights[1:]] for s in chosen])
            at = np.flatnonzero(weights)
            trained += len(at)
            index = torch.from_numpy(at).to(self._device)
            hidden = qwen3.hidden_states(self._shape, self._weights, packed, index - 1)
            logprobs, _ = self._token_logprobs(self._weights, hidden, packed.token_ids[index], 1.0)
            weighed = -logprobs * torch.from_numpy(weights[at]).to(self._device)
            loss = weighed.sum() / total_weight
            sums.loss += float(loss.detach())
            sums.nonfinite += _nonfinite(logprobs)
            spoken = np.concatenate([sequence.assistant for sequence in chosen])[at]
            by_assistant = logprobs[torch.from_numpy(spoken).to(self._device)]
            sums.add("assistant_loss", -by_assistant)
            sums.add("assistant_tokens", torch.ones_like(by_assistant))
            torch.autograd.backward(loss)
        result = self._finish(sums, scale, tokens=sum(lengths), trained_tokens=trained)
        spoken_tokens = max(1.0, sums.totals["assistant_tokens"])
        assistant_loss = sums.totals["assistant_loss"] / spoken_tokens
        return replace(result, values={"assistant_loss": assistant_loss})

    def weights(self) -> Mapping[str, TensorLike]:
        """Copy the weights, by the names and in the dtypes of the model folder."""
        return published(self._weights, self._dtypes)

    def weights_of(self, folder: Path) -> Mapping[str, TensorLike]:
        """Read the weights of a model folder or checkpoint, as `weights` gives those held."""
        return published(read_model(folder, qwen3.parameter_shapes(self._shape)), self._dtypes)

    def save(self, folder: Path) -> None:
        """Write a complete model folder and the optimizer's state into an empty folder."""
        # As held, whatever is published: rounding would lose small updates at each resume.
        exact = {name: tensor.detach().cpu() for name, tensor in self._weights.items()}
        save_file(exact, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        for name, content in self._companions.items():
            (folder / name).write_bytes(content)
        if self._optimizer is not None:
            state = {name: tensor.cpu() for name, tensor in self._optimizer.state().items()}
            save_file(state, folder / OPTIMIZER_FILE)
        if self._reference is not None:
            kept = {name: tensor.cpu() for name, tensor in self._reference.items()}
            save_file(kept, folder / REFERENCE_FILE)

    def load(self, folder: Path, *, optimizer: OptimizerConfig | None) -> None:
        """Take the weights of a model folder or checkpoint, and the optimizer's state if asked.

        Weights alone may be of any dtype and are converted, as those of any model folder. With the
        optimizer's state a checkpoint of another dtype is refused: to go on from it exactly is what
        it was written for, and converted it would go on as another run, without a word.

        Raises:
            ModelError: The weights are not those of this model.
            CheckpointInvalid: The optimizer's state is missing or of another kind, or the
                checkpoint is of another dtype.
        """
        tensors = read_model(folder, qwen3.parameter_shapes(self._shape))
        held = {tensor.dtype for tensor in tensors.values()}
        if optimizer is not None and held != {self._dtype}:
            raise CheckpointInvalid(
                f"{folder}: the checkpoint is in {', '.join(sorted(map(str, held)))} and this "
                f"back-end trains in {self._dtype}; set torch.dtype to the checkpoint's to go on "
                "from it, or start another stage from its weights"
            )
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(tensors[name])
        reference = folder / REFERENCE_FILE
        self._reference = self._optimizer = None
        if optimizer is None:
            return
        if reference.is_file():
            kept = read_tensors([reference])
            self._reference = {name: tensor.to(self._device) for name, tensor in kept.items()}
        self.start_optimizer(optimizer)
        started: Optimizer | None = self._optimizer
        assert started is not None
        try:
            started.load(read_tensors([folder / OPTIMIZER_FILE]))
        except ValueError as error:
            raise CheckpointInvalid(f"{folder / OPTIMIZER_FILE}: {error}") from error

    def _passes(self, attempts: Sequence[PolicyAttempt]) -> list[PolicyPass]:
        limit = self._config.micro_batch_tokens
        return list(policy_passes(attempts, max_tokens=limit, device=self._device))

    def _score(
        self, weights: Mapping[str, Tensor], part: PolicyPass, temperature: float
    ) -> tuple[Tensor, Tensor]:
        hidden = qwen3.hidden_states(self._shape, weights, part.packed, part.sources)
        return self._token_logprobs(weights, hidden, part.targets, temperature)

    def _token_logprobs(
        self, weights: Mapping[str, Tensor], hidden: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            hidden,
            qwen3.output_weight(self._shape, weights),
            targets,
            temperature=temperature,
            chunk_tokens=self._config.logit_chunk_tokens,
        )

    def _finish(
        self, sums: _Sums, scale: float, *, tokens: int, trained_tokens: int
    ) -> UpdateResult:
        """Apply the accumulated gradients, unless something in them is not finite."""
        if self._optimizer is None:
            raise RuntimeError("no stage has begun; call start_optimizer first")
        grads = [w.grad for w in self._weights.values() if w.grad is not None]
        squares = torch.stack([grad.double().square().sum() for grad in grads])
        norm = float(squares.sum().sqrt())
        if not np.isfinite(norm):
            sums.nonfinite += sum(_nonfinite(grad) for grad in grads)
        applied = sums.nonfinite == 0 and bool(np.isfinite(norm))
        if applied:
            if self._clip and norm > self._clip:
                for grad in grads:
                    grad.mul_(self._clip / norm)
            self._optimizer.step(scale)
        for weight in self._weights.values():
            weight.grad = None
        return UpdateResult(
            applied=applied,
            nonfinite=sums.nonfinite,
            loss=sums.loss,
            grad_norm=norm,
            tokens=tokens,
            trained_tokens=trained_tokens,
        )


def _policy_terms(
    config: PolicyLossConfig,
    part: PolicyPass,
    current: Tensor,
    entropy: Tensor,
    *,
    advantage: Tensor,
    behaviour: Tensor,
    proximal: Tensor,
    reference: Tensor | None,
    sums: _Sums,
) -> Tensor:
    attempts = len(part.members)
    terms = policy_loss(
        current,
        proximal,
        advantage,
        part.attempt,
        attempts,
        kind=config.ratio,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    correction = behaviour_correction(
        proximal,
        behaviour,
        part.attempt,
        attempts,
        weight=config.correction.weight,
        cap=config.correction.cap,
        mask=config.correction.mask,
        mask_low=config.correction.mask_low,
        mask_high=config.correction.mask_high,
    )
    per_token = terms.loss * correction
    if reference is not None and config.kl_coefficient:
        kl = kl_to_reference(current, reference)
        per_token = per_token + config.kl_coefficient * kl
        sums.add("kl.reference", kl)
    if config.entropy_coefficient:
        per_token = per_token - config.entropy_coefficient * entropy
    difference = (current.detach() - behaviour).double()
    sums.add("entropy", entropy)
    sums.add("ratio.mean", terms.ratio)
    sums.add("clip.low", terms.clipped_low)
    sums.add("clip.high", terms.clipped_high)
    sums.add("clip.dual", terms.clipped_dual)
    sums.add("correction.mean", correction)
    sums.add("correction.masked", correction == 0)
    sums.add("kl.behaviour", torch.expm1(difference) - difference)
    sums.peak("ratio.max", terms.ratio)
    return per_token


def _temperature(attempts: Sequence[PolicyAttempt]) -> float:
    found = sorted({attempt.temperature for attempt in attempts})
    if len(found) > 1:
        raise ValueError(f"attempts of one minibatch need one temperature, found {found}")
    return found[0] if found else 1.0


def _nonfinite(values: Tensor) -> int:
    return int((~torch.isfinite(values.detach())).sum())
