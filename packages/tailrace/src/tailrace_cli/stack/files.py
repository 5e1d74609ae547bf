"""Files that ship with the package."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
LOCAL_STACK = PACKAGE / "stack" / "local.toml"
"""The embedded stack; infra/local/stack.toml is the same file."""
BASE_MODEL = PACKAGE / "demo" / "base"
"""The tiny base model, made by tools/pretrain_base.py."""
