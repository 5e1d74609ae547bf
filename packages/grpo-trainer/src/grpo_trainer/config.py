"""Settings of the service, and the recipes of its stages. Importable without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pydantic
from service_kit.channel import ChannelConfig
from service_kit.config import Config
from service_kit.server import ServerConfig
from service_kit.telemetry import TelemetryConfig
from weight_sync.publisher import PublishConfig

from grpo_trainer.core.objective import (
    AdvantageKind,
    Aggregation,
    CorrectionMask,
    CorrectionWeight,
    RatioKind,
)

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class OptimizerConfig(Config):
    """An optimizer and its schedule."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon` updates matrices by orthogonalised momentum, and all else by AdamW."""
    learning_rate: float = pydantic.Field(default=4e-4, gt=0)
    """Peak rate of AdamW."""
    muon_learning_rate: float = pydantic.Field(default=0.02, gt=0)
    """Peak rate of Muon's matrices; embeddings are not among them."""
    muon_momentum: float = pydantic.Field(default=0.95, ge=0, lt=1)
    """Of Muon's matrices."""
    beta1: float = pydantic.Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the first moment."""
    beta2: float = pydantic.Field(default=0.95, ge=0, lt=1)
    """AdamW's decay of the second moment."""
    epsilon: float = pydantic.Field(default=1e-8, gt=0)
    """AdamW's."""
    weight_decay: float = pydantic.Field(default=0.0, ge=0)
    """Decoupled, on matrices."""
    gradient_clip: float = pydantic.Field(default=0.5, ge=0)
    """Norm that gradients are scaled down to; 0: never."""
    warmup_steps: int = pydantic.Field(default=5, ge=0)
    """Steps over which the rate rises linearly from near 0."""
    decay: Literal["linear", "constant"] = "linear"
    """What the rate does over the whole stage."""
    floor: float = pydantic.Field(default=0.1, ge=0, le=1)
    """Where the linear decay ends, as a share of the peak."""


class CorrectionConfig(Config):
    """What is done about tokens that another policy sampled. See docs/losses.md."""

    weight: CorrectionWeight = CorrectionWeight.NONE
    """Level of the importance weight: `token` with a cap is TIS."""
    cap: float = pydantic.Field(default=2.0, gt=0)
    """Truncates the weight from above."""
    mask: CorrectionMask = CorrectionMask.NONE
    """Level of the mask: `token` is IcePop, `sequence` and `geometric` are MIS."""
    mask_low: float = pydantic.Field(default=0.5, ge=0)
    """Lower end of the band of ratios that stay."""
    mask_high: float = pydantic.Field(default=5.0, gt=0)
    """Upper end of the band of ratios that stay."""


class PolicyLossConfig(Config):
    """The objective of a policy update. See docs/losses.md."""

    ratio: RatioKind = RatioKind.TOKEN
    """What is clipped: `token` (GRPO), `sequence` (GSPO) or `cispo`."""
    clip_low: float = pydantic.Field(default=0.2, ge=0, le=1)
    """How far below 1 a ratio counts."""
    clip_high: float = pydantic.Field(default=0.28, ge=0)
    """How far above 1 a ratio counts."""
    dual_clip: float | None = pydantic.Field(default=None, gt=1)
    """Bound of the loss of tokens with a negative advantage; null: none."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """What is averaged over."""
    fixed_length: int = pydantic.Field(default=0, ge=0)
    """The constant for `fixed_length`, tokens."""
    kl_coefficient: float = pydantic.Field(default=0.0, ge=0)
    """Weight of the k3 estimate of the KL to the policy at the start of the stage; 0: none."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus; 0: none."""
    correction: CorrectionConfig = CorrectionConfig()
    """What is done about tokens that another policy sampled."""

    @pydantic.model_validator(mode="after")
    def _fixed_length_fits(self) -> PolicyLossConfig:
        if (self.aggregation is Aggregation.FIXED_LENGTH) != (self.fixed_length > 0):
            raise ValueError(
                "fixed_length must be above 0 with aggregation 'fixed_length', and 0 without it"
            )
        return self


class CheckpointConfig(Config):
    """When checkpoints are written, and how many stay."""

    every_steps: int = pydantic.Field(default=10, ge=1)
    """A checkpoint each so many steps; there is one at the start and at the end anyway."""
    keep: int = pydantic.Field(default=2, ge=1)
    """How many of the newest stay on disk."""


class SftConfig(Config):
    """Recipe of a supervised stage."""

    traces: tuple[Path, ...] = pydantic.Field(min_length=1)
    """Files of trajectories: ATIF, one a line."""
    successes_only: bool = False
    """Leave out trajectories that are not marked as solved."""
    max_traces: int = pydantic.Field(default=0, ge=0)
    """Use the first so many; 0: all."""
    steps: int = pydantic.Field(default=0, ge=0)
    """Optimizer steps; 0: one pass over the traces."""
    batch_size: int = pydantic.Field(default=16, ge=1)
    """Trajectories of a step."""
    bucket_batches: int = pydantic.Field(default=8, ge=1)
    """So many batches are sorted by length together, to keep padding small."""
    max_tokens: int = pydantic.Field(default=0, ge=0)
    """Leave out longer trajectories, and say how many; 0: the model's context."""
    observation_weight: float = pydantic.Field(default=0.3, ge=0)
    """What predicting a token of an observation weighs, next to 1 for the assistant's."""
    prompt_weight: float = pydantic.Field(default=0.3, ge=0)
    """What predicting a token of the opening weighs."""
    seed: int = 0
    """Of the order of trajectories."""
    optimizer: OptimizerConfig = OptimizerConfig(
        kind="muon", learning_rate=2e-3, gradient_clip=1.0, warmup_steps=20, floor=0.05
    )
    """Optimizer and schedule."""
    checkpoint: CheckpointConfig = CheckpointConfig(every_steps=100)
    """Checkpoints."""
    start_from: str = ""
    """A finished stage whose weights to start from; empty: the weights held now."""


class LimitsConfig(Config):
    """What an attempt may use up; 0: the rollout engine's own default."""

    turns: int = pydantic.Field(default=0, ge=0)
    """Generations of the policy."""
    turn_tokens: int = pydantic.Field(default=0, ge=0)
    """Tokens sampled in one turn."""
    total_tokens: int = pydantic.Field(default=0, ge=0)
    """Tokens sampled in all turns together."""
    context_tokens: int = pydantic.Field(default=0, ge=0)
    """Length of prompt and all that is appended to it."""
    command_time_s: float = pydantic.Field(default=0.0, ge=0)
    """Summed run time of an attempt's own commands."""
    repeated_actions: int = pydantic.Field(default=0, ge=0)
    """The same action this often in a row ends the attempt."""


class AdvantageConfig(Config):
    """How rewards become advantages."""

    kind: AdvantageKind = AdvantageKind.STD
    """`std` (GRPO), `mean` (Dr. GRPO) or `leave_one_out` (RLOO)."""
    epsilon: float = pydantic.Field(default=1e-6, ge=0)
    """Added to the standard deviation."""


class RecomputeConfig(Config):
    """When the proximal policy's log-probabilities are computed anew rather than taken as sampled.

    The first minibatch of a step needs no recompute: its own forward pass gives them.
    """

    mode: Literal["auto", "always", "never"] = "auto"
    """`auto` measures on a sample just before each step; `never` clips around the behaviour."""
    skip_below_kl: float = pydantic.Field(default=1e-3, ge=0)
    """In `auto`: skip if the sample's KL between behaviour and present weights is below this."""
    sample_attempts: int = pydantic.Field(default=4, ge=1)
    """In `auto`: attempts that are scored for the estimate."""


class AdmissionConfig(Config):
    """When groups start."""

    staleness_bound: int = pydantic.Field(default=2, ge=0)
    """Optimizer steps that may lie between weights that sample a token and its training."""
    over_bound: Literal["mask", "drop"] = "mask"
    """What is done with a slow group's tokens beyond the bound: train on the rest of the group
    (their attempts still count in the baseline), or drop the whole group."""
    max_in_flight_groups: int = pydantic.Field(default=0, ge=0)
    """Most groups at the engines at once; 0: what the bound and the engines' credits allow."""
    pace_headroom: float = pydantic.Field(default=2.0, ge=0)
    """Groups that work ahead start this many times as fast as they are used up; 0: at once."""

    @pydantic.field_validator("pace_headroom")
    @classmethod
    def _not_a_brake(cls, value: float) -> float:
        if 0 < value < 1:
            raise ValueError("must be 0 or at least 1, or starts fall behind the steps")
        return value


class CurriculumConfig(Config):
    """The order of tasks."""

    seed: int = 0
    """Of the order."""
    avoid_after: int = pydantic.Field(default=0, ge=0)
    """Groups in a row, all solved or all unsolved, after which a task is left out; 0: never."""
    avoid_passes: int = pydantic.Field(default=1, ge=1)
    """For how many passes over the task set."""


class GrpoConfig(Config):
    """Recipe of an asynchronous GRPO stage."""

    task_set: str = ""
    """Name of the task set that the evaluator lists."""
    tasks: tuple[str, ...] = ()
    """Task ids, instead of a task set."""
    max_tasks: int = pydantic.Field(default=0, ge=0)
    """Use the first so many tasks of the set; 0: all."""
    steps: int = pydantic.Field(default=60, ge=1)
    """Optimizer steps."""
    time_limit_s: float = pydantic.Field(default=0.0, ge=0)
    """End the stage after so many seconds of work, and decay the rate towards that; 0: never."""
    batch_groups: int = pydantic.Field(default=16, ge=1)
    """Groups that one step trains."""
    group_size: int = pydantic.Field(default=8, ge=2)
    """Attempts at a task."""
    mode: Literal["async", "sync"] = "async"
    """`sync` starts groups only when all engines hold the newest weights, and waits for the whole
    batch: the baseline that asynchrony is measured against."""
    backfill: bool = True
    """Wait for `batch_groups` groups with variance; else a step takes what has variance among
    `batch_groups` finished ones."""
    minibatches: int = pydantic.Field(default=2, ge=1)
    """Optimizer updates of a step."""
    epochs: int = pydantic.Field(default=1, ge=1)
    """Passes over a step's attempts."""
    temperature: float = pydantic.Field(default=1.0, gt=0)
    """Of sampling."""
    seed: int = 0
    """Of sampling and minibatches."""
    limits: LimitsConfig = LimitsConfig()
    """What an attempt may use up."""
    advantage: AdvantageConfig = AdvantageConfig()
    """How rewards become advantages."""
    loss: PolicyLossConfig = PolicyLossConfig()
    """The objective."""
    recompute: RecomputeConfig = RecomputeConfig()
    """When the proximal policy is scored."""
    admission: AdmissionConfig = AdmissionConfig()
    """When groups start."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """The order of tasks."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and schedule."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    engine_lost_s: float = pydantic.Field(default=60.0, gt=0)
    """An engine that is silent for longer loses its groups to others."""
    stall_s: float = pydantic.Field(default=900.0, gt=0)
    """With no group arriving for this long the stage fails."""
    max_refused_updates: int = pydantic.Field(default=3, ge=1)
    """Steps in a row without a finite update after which the stage fails."""
    shuffle_rewards: bool = False
    """Control experiment: deal each group's rewards to its attempts at random."""
    start_from: str = ""
    """A finished stage whose weights to start from; empty: the weights held now."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> GrpoConfig:
        if bool(self.task_set) == bool(self.tasks):
            raise ValueError("give either task_set or tasks")
        if self.mode == "sync" and self.admission.staleness_bound != 0:
            raise ValueError("mode 'sync' needs admission.staleness_bound = 0")
        return self


class TorchConfig(Config):
    """The torch back-end."""

    threads: int = pydantic.Field(default=1, ge=1)
    """Threads of one operation. More than idle cores makes it many times slower."""
    dtype: Literal["float32", "float64"] = "float32"
    """What weights, optimizer and checkpoints are held in and all is computed in; what is published
    has the model folder's own dtypes. `float64` is for measurements, as that of the embedded
    engine, and takes twice the memory and time. A stage resumes in the dtype that it began in."""
    device: str = "cpu"
    """Such as `cpu` or `cuda`."""
    micro_batch_tokens: int = pydantic.Field(default=2048, ge=1)
    """Tokens of one forward and backward pass; a longer attempt is a pass of its own."""
    logit_chunk_tokens: int = pydantic.Field(default=1024, ge=1)
    """Tokens whose logits exist at once."""


class EngineTarget(Config):
    """A rollout engine."""

    name: str = pydantic.Field(default="", pattern=r"^[A-Za-z0-9._-]{0,64}$")
    """By which checkpoints know it; must stay when its address changes. Empty: by its place in the
    list, such as `engine-0`."""
    channel: ChannelConfig
    """Where it is."""


class TrainerConfig(Config):
    """Settings of the service."""

    run: str = pydantic.Field(default="run", pattern=NAME_PATTERN)
    """Name of the run; versions and groups carry it."""
    run_dir: Path
    """Folder of the run: stages, checkpoints, metrics. Made if missing."""
    model: Path
    """Model folder to start from: config.json, model.safetensors, tokenizer.json, chat template."""
    resume: bool = True
    """Go on with a run that the folder holds already; else such a folder is an error."""
    backend: Literal["torch"] = "torch"
    """What computes."""
    torch: TorchConfig = TorchConfig()
    """Settings of that back-end."""
    server: ServerConfig = ServerConfig(bind="127.0.0.1:7105", drain_grace_s=60.0)
    """Where TrainerService listens. A drain lets the stage at hand write its checkpoint."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Traces and metrics."""
    weights: ChannelConfig = ChannelConfig(target="127.0.0.1:7103")
    """WeightService, where versions are announced."""
    publish: PublishConfig = PublishConfig()
    """How versions are written: whole, or as deltas between anchors."""
    evaluator: ChannelConfig = ChannelConfig(target="127.0.0.1:7102")
    """EvalService, which lists tasks."""
    engines: tuple[EngineTarget, ...] = (
        EngineTarget(channel=ChannelConfig(target="127.0.0.1:7104")),
    )
    """Rollout engines that run the groups."""
    call_timeout_s: float = pydantic.Field(default=30.0, gt=0)
    """Deadline of a unary call to another service."""
    publish_timeout_s: float = pydantic.Field(default=120.0, gt=0)
    """Longest that publishing one version may take."""
    heartbeat_s: float = pydantic.Field(default=5.0, gt=0)
    """Between heartbeats of WatchStage."""

    @property
    def engine_names(self) -> tuple[str, ...]:
        """Names of the engines, in order."""
        return tuple(engine.name or f"engine-{index}" for index, engine in enumerate(self.engines))

    @pydantic.model_validator(mode="after")
    def _names_differ(self) -> TrainerConfig:
        names = self.engine_names
        if len(set(names)) != len(names):
            raise ValueError(f"engines need names that differ, found {list(names)}")
        return self
