"""SFT and fully asynchronous GRPO for coding agents. Importing this needs no torch.

The losses are pure functions of flat tensors (extra `torch`):

    import torch
    from grpo_trainer.losses import AdvantageKind, group_advantages, policy_loss

    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    group = torch.tensor([0, 0, 1, 1])
    valid = torch.ones(4, dtype=torch.bool)
    advantages = group_advantages(rewards, group, valid, kind=AdvantageKind.STD)
    current = torch.tensor([-1.0, -0.5, -2.0, -0.1], requires_grad=True)
    terms = policy_loss(current, current.detach(), advantages, group, 2)
    terms.loss.mean().backward()

A run is served by `python -m grpo_trainer serve`; see `grpo_trainer.config` for its settings and
for the recipes of its stages.
"""

from grpo_trainer.config import (
    GrpoConfig,
    OptimizerConfig,
    PolicyLossConfig,
    SftConfig,
    TorchConfig,
    TrainerConfig,
)
from grpo_trainer.core.admission import AdmissionRules, Pipeline, next_start
from grpo_trainer.core.staleness import Lineage
from grpo_trainer.errors import (
    CheckpointInvalid,
    DiskFull,
    FencedOff,
    ModelError,
    RecipeError,
    RunConflict,
    StageConflict,
    StageDiffers,
    Stalled,
    TraceError,
    TrainerError,
    UnknownStage,
)
from grpo_trainer.peers import GrpcPeers, Peers
from grpo_trainer.recipes import parse_recipe, shipped_recipe, shipped_recipes
from grpo_trainer.run import TrainerRun
from grpo_trainer.stage import StageKind, StageState

__all__ = [
    "AdmissionRules",
    "CheckpointInvalid",
    "DiskFull",
    "FencedOff",
    "GrpcPeers",
    "GrpoConfig",
    "Lineage",
    "ModelError",
    "OptimizerConfig",
    "Peers",
    "Pipeline",
    "PolicyLossConfig",
    "RecipeError",
    "RunConflict",
    "SftConfig",
    "StageConflict",
    "StageDiffers",
    "StageKind",
    "StageState",
    "Stalled",
    "TorchConfig",
    "TraceError",
    "TrainerConfig",
    "TrainerError",
    "TrainerRun",
    "UnknownStage",
    "next_start",
    "parse_recipe",
    "shipped_recipe",
    "shipped_recipes",
]
