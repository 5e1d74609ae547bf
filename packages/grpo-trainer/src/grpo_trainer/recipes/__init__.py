"""Recipes of stages: TOML that ships with the package, and how a stage's own is read."""

from __future__ import annotations

import tempfile
from importlib import resources
from pathlib import Path

from service_kit.config import ConfigError, load_config

from grpo_trainer.config import GrpoConfig, SftConfig
from grpo_trainer.errors import RecipeError, StageDiffers
from grpo_trainer.stage import StageKind

StageRecipe = SftConfig | GrpoConfig

_MODELS: dict[StageKind, type[SftConfig] | type[GrpoConfig]] = {
    StageKind.SFT: SftConfig,
    StageKind.GRPO: GrpoConfig,
}
# What may differ when a stage is started again: none of it changes what was learned so far.
_FREE_KEYS = {"steps", "time_limit_s", "checkpoint", "stall_s", "engine_lost_s"}


def shipped_recipes() -> tuple[str, ...]:
    """List the recipes that ship with the package."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))


def shipped_recipe(name: str) -> str:
    """Return the TOML of a recipe that ships with the package.

    Raises:
        RecipeError: There is none of this name.
    """
    if name not in shipped_recipes():
        raise RecipeError(f"no recipe is named {name!r}; there are {list(shipped_recipes())}")
    return resources.files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8")


def parse_recipe(kind: StageKind, toml: str) -> StageRecipe:
    """Read a recipe; a key that it does not know is an error that names the closest one.

    Raises:
        RecipeError: Lists what is wrong.
    """
    with tempfile.TemporaryDirectory(prefix="recipe-") as folder:
        file = Path(folder) / "recipe"
        file.write_text(toml, encoding="utf-8")
        try:
            return load_config(_MODELS[kind], file=file, env_prefix="TAILRACE_RECIPE")
        except ConfigError as error:
            raise RecipeError(str(error).replace(str(file), "recipe")) from error


def check_same_recipe(name: str, before: StageRecipe, after: StageRecipe) -> None:
    """Refuse to go on with a stage under a recipe that would have taught something else.

    Raises:
        StageDiffers: Names the keys that differ.
    """
    if type(before) is not type(after):
        raise StageDiffers(f"stage {name!r} exists and is of another kind; choose another name")
    old, new = before.model_dump(), after.model_dump()
    differing = sorted(key for key in old if old[key] != new[key] and key not in _FREE_KEYS)
    if differing:
        raise StageDiffers(
            f"stage {name!r} exists with another recipe: {', '.join(differing)} differ. Only "
            f"{', '.join(sorted(_FREE_KEYS))} may change when a stage goes on; choose another name "
            "for another recipe"
        )
