"""How a receiver talks to engines."""

from weight_sync.drivers.base import Activation, EngineDriver, Observation
from weight_sync.drivers.embedded import EmbeddedDriver

__all__ = ["Activation", "EmbeddedDriver", "EngineDriver", "Observation"]
