"""The recipes of the demo's two training stages: the shipped TOML, and what the options change."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from grpo_trainer.config import GrpoConfig, SftConfig
from pydantic import ValidationError
from service_kit.config import Config, ConfigError, closest_key

from tailrace_cli.demo.options import Control, DemoOptions
from tailrace_cli.stack.spec import apply_setting

FOLDER = Path(__file__).parent
MORE_SFT_STEPS = 4
"""The control "more-sft" takes this many times the SFT steps: about what learning costs."""


def shipped(name: str) -> dict[str, Any]:
    """A recipe as it ships: `sft` or `grpo`."""
    return tomllib.loads((FOLDER / f"{name}.toml").read_text())


def recipes_of(options: DemoOptions) -> dict[str, dict[str, Any]]:
    """Recipes by stage: `sft` with keys of SftConfig but its traces, `rl` with keys of GrpoConfig.

    Raises:
        ConfigError: a setting is none, or the trainer would refuse the recipe.
    """
    recipes = {"sft": _sft(options), "rl": _grpo(options)}
    for setting in options.recipe_settings:
        apply_setting(recipes, setting)
    # Checked here because the trainer would say so only after minutes of other work.
    _check("sft", SftConfig, recipes["sft"] | {"traces": ["traces.jsonl"]})
    _check("rl", GrpoConfig, recipes["rl"])
    return recipes


def _check(name: str, model: type[Config], recipe: Mapping[str, Any]) -> None:
    try:
        model.model_validate(recipe)
    except ValidationError as error:
        lines = []
        for e in error.errors():
            key = ".".join(map(str, e["loc"]))
            near = closest_key(key, model) if e["type"] == "extra_forbidden" else None
            hint = f"; did you mean {name}.{near}?" if near else ""
            lines.append(f"{name}.{key}: {e['msg']}{hint}")
        raise ConfigError("the recipe is not valid:\n  " + "\n  ".join(lines)) from error


def _sft(options: DemoOptions) -> dict[str, Any]:
    recipe = shipped("sft") | {"seed": options.seed}
    if options.control is Control.MORE_SFT:
        recipe["steps"] *= MORE_SFT_STEPS
    if options.control is Control.SFT_SUCCESSES:
        recipe["successes_only"] = True
    return recipe


def _grpo(options: DemoOptions) -> dict[str, Any]:
    recipe = shipped("grpo") | {"steps": options.steps, "seed": options.seed}
    recipe["curriculum"] = recipe.get("curriculum", {}) | {"seed": options.seed}
    if options.control is Control.SHUFFLED_REWARDS:
        recipe["shuffle_rewards"] = True
    if options.sync:
        recipe["mode"] = "sync"
        recipe["admission"] = recipe.get("admission", {}) | {"staleness_bound": 0}
    return recipe


def as_toml(recipe: Mapping[str, Any]) -> str:
    """The text that StartStage takes."""
    return tomli_w.dumps(dict(recipe))
