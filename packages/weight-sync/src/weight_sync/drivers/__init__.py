"""How a receiver talks to engines."""

from weight_sync.drivers.base import Activation, EngineDriver, Observation
from weight_sync.drivers.embedded import EmbeddedDriver
from weight_sync.drivers.http_engine import DriverSettings
from weight_sync.drivers.sglang import SglangDriver

__all__ = [
    "Activation",
    "DriverSettings",
    "EmbeddedDriver",
    "EngineDriver",
    "Observation",
    "SglangDriver",
]
