"""The embedded engine: SGLang's API over a decode loop of our own, for one CPU core.

Importing this package is cheap; its modules but `config` and `main` need the extra `cpu`.
"""

from __future__ import annotations

from rollout_engine.engines.cpu.config import CpuEngineConfig

__all__ = ["CpuEngineConfig"]
