"""Configuration of a consumer; apart from the service's own, for consumers embed it in theirs."""

from __future__ import annotations

import pydantic
from service_kit.config import Config


class ConsumerConfig(Config):
    """How a consumer keeps its stream."""

    heartbeat_s: float = pydantic.Field(default=5.0, gt=0)
    """Longest silence of this side."""

    idle_s: float = pydantic.Field(default=30.0, gt=0)
    """A stream on which the engine is silent for longer is given up and opened again."""

    reconnect_initial_s: float = pydantic.Field(default=0.2, gt=0)
    """Longest wait before the first reconnection; the real one is random below it."""

    reconnect_max_s: float = pydantic.Field(default=5.0, gt=0)
    """Longest wait before any reconnection."""

    max_attempt_bytes: int = pydantic.Field(default=256 * 1024 * 1024, ge=1024)
    """Largest serialised attempt that is taken in."""


__all__ = ["ConsumerConfig"]
