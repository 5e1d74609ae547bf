"""What a demo run was asked for."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field
from service_kit.config import Config

RECIPES = ("sft.", "rl.")


class Control(StrEnum):
    """Control experiments: one thing is changed, everything else stays (docs/results.md)."""

    NONE = "none"
    SHUFFLED_REWARDS = "shuffled-rewards"
    """Rewards are dealt out anew within each batch: nothing should be learned."""
    MORE_SFT = "more-sft"
    """No reinforcement learning; the same compute goes into more SFT."""
    SFT_SUCCESSES = "sft-successes"
    """SFT on the expert's solved traces alone."""


class DemoOptions(Config):
    """Options of `tailrace demo`, kept in the run's folder: `--resume` goes on with the same."""

    seed: int = Field(default=0, ge=0)
    """Seed of task order, sampling, initial optimizer state and evaluation."""
    steps: int = Field(default=40, ge=1)
    """Optimizer steps of the reinforcement learning stage."""
    minutes: float | None = Field(default=None, gt=0)
    """Wall time after which the learning stage ends early, leaving time for the last evaluation."""
    sync: bool = False
    """Synchronous instead of asynchronous: each step waits for all of its attempts."""
    control: Control = Control.NONE
    """Which control experiment, if any."""
    eval_tasks: int = Field(default=130, ge=1)
    """Held-out tasks of each evaluation."""
    eval_attempts: int = Field(default=4, ge=1)
    """Attempts a task in each evaluation."""
    traces: int = Field(default=1000, ge=1)
    """Expert traces for SFT."""
    overrides: tuple[str, ...] = ()
    """Settings by name: of a service, such as `sandbox.faults.exec_rate=0.1`, or of a recipe (`sft`
    and `rl`), such as `rl.batch_groups=8`."""

    @property
    def recipe_settings(self) -> tuple[str, ...]:
        """Those for recipes."""
        return tuple(s for s in self.overrides if s.startswith(RECIPES))

    @property
    def service_settings(self) -> tuple[str, ...]:
        """Those for services."""
        return tuple(s for s in self.overrides if not s.startswith(RECIPES))
