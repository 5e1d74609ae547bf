from __future__ import annotations

import subprocess
import sys

import pytest
from grpo_trainer import GrpoConfig, RecipeError, SftConfig, StageDiffers, StageKind
from grpo_trainer.recipes import (
    check_same_recipe,
    parse_recipe,
    shipped_recipe,
    shipped_recipes,
)


def test_the_recipes_that_ship_are_valid() -> None:
    assert set(shipped_recipes()) == {"grpo", "sft"}
    grpo = parse_recipe(StageKind.GRPO, shipped_recipe("grpo"))
    assert isinstance(grpo, GrpoConfig)
    assert grpo.loss.correction.weight == "token"
    sft = parse_recipe(StageKind.SFT, 'traces = ["t.jsonl"]\n' + shipped_recipe("sft"))
    assert isinstance(sft, SftConfig)
    assert sft.optimizer.kind == "adamw"
    with pytest.raises(RecipeError, match=r"no recipe is named 'other'; there are \['grpo', 'sft'"):
        shipped_recipe("other")


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("stepz = 3", r"recipe: unknown key 'stepz'; closest valid key: 'steps'"),
        ("[optimizer]\nlr = 1", "unknown key 'optimizer.lr'"),
        ('[loss]\nratio = "gspo"', "loss.ratio"),
        ('[loss]\naggregation = "fixed_length"', "fixed_length must be above 0"),
        ("[loss]\nfixed_length = 9", "fixed_length must be above 0"),
        ("[loss]\ndual_clip = 0.5", "loss.dual_clip"),
        ("group_size = 1", "group_size"),
        ("[admission]\npace_headroom = 0.5", "must be 0 or at least 1"),
        ('mode = "sync"', "staleness_bound = 0"),
    ],
)
def test_a_recipe_that_is_wrong_is_refused_with_key_and_reason(toml: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        parse_recipe(StageKind.GRPO, 'task_set = "train"\n' + toml)


def test_only_what_teaches_nothing_else_may_change_when_a_stage_goes_on() -> None:
    before = parse_recipe(StageKind.GRPO, 'task_set = "t"\nsteps = 10')
    longer = 'task_set = "t"\nsteps = 20\nstall_s = 5\n[checkpoint]\nkeep = 9'
    check_same_recipe("rl", before, parse_recipe(StageKind.GRPO, longer))
    with pytest.raises(StageDiffers, match="group_size, seed differ"):
        check_same_recipe(
            "rl", before, parse_recipe(StageKind.GRPO, 'task_set = "t"\nseed = 1\ngroup_size = 4')
        )
    with pytest.raises(StageDiffers, match="another kind"):
        check_same_recipe("rl", before, parse_recipe(StageKind.SFT, 'traces = ["t"]'))


def test_nothing_but_a_back_end_imports_torch() -> None:
    code = (
        "import grpo_trainer, grpo_trainer.app, grpo_trainer.service, grpo_trainer.sft.traces, sys;"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
