"""What the service reads of a model folder besides its template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rollout_engine.app import model_context_tokens
from service_kit.errors import StartupError


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 77}}, 77),
        ({}, 0),
    ],
)
def test_the_models_context_is_read_from_its_config(
    tmp_path: Path, config: dict[str, object], expected: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_context_tokens(tmp_path) == expected


def test_a_folder_without_a_config_sets_no_limit(tmp_path: Path) -> None:
    assert model_context_tokens(tmp_path) == 0


def test_a_broken_config_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StartupError, match="not JSON"):
        model_context_tokens(tmp_path)
