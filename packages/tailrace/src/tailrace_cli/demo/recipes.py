"""The recipes of the demo's two training stages: the shipped TOML, and what the options change."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from tailrace_cli.demo.options import Control, DemoOptions

FOLDER = Path(__file__).parent
MORE_SFT_STEPS = 4
"""The control "more-sft" takes this many times the SFT steps: about what learning costs."""


def shipped(name: str) -> dict[str, Any]:
    """A recipe as it ships: `sft` or `grpo`."""
    return tomllib.loads((FOLDER / f"{name}.toml").read_text())


def sft_recipe(options: DemoOptions, traces: Path) -> dict[str, Any]:
    """Keys of grpo_trainer's SftConfig."""
    recipe = shipped("sft") | {"traces": [str(traces.resolve())], "seed": options.seed}
    if options.control is Control.MORE_SFT:
        recipe["steps"] *= MORE_SFT_STEPS
    if options.control is Control.SFT_SUCCESSES:
        recipe["successes_only"] = True
    return recipe


def grpo_recipe(options: DemoOptions) -> dict[str, Any]:
    """Keys of grpo_trainer's GrpoConfig."""
    recipe = shipped("grpo") | {"steps": options.steps, "seed": options.seed}
    recipe["curriculum"] = dict(recipe.get("curriculum", {})) | {"seed": options.seed}
    if options.control is Control.SHUFFLED_REWARDS:
        recipe["shuffle_rewards"] = True
    if options.sync:
        recipe["mode"] = "sync"
        recipe["admission"] = dict(recipe.get("admission", {})) | {"staleness_bound": 0}
    return recipe


def as_toml(recipe: Mapping[str, Any]) -> str:
    """The text that StartStage takes."""
    return tomli_w.dumps(dict(recipe))
