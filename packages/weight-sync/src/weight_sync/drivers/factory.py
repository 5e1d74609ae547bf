"""Which driver an engine gets."""

from collections.abc import Callable

from weight_sync.config import ReceiverConfig
from weight_sync.core.registry import EngineEndpoint
from weight_sync.drivers.base import EngineDriver
from weight_sync.drivers.embedded import EmbeddedDriver
from weight_sync.drivers.http_engine import DriverSettings
from weight_sync.drivers.sglang import SglangDriver
from weight_sync.drivers.sglang_distributed import SglangDistributedDriver
from weight_sync.errors import UnknownEngineKind

DriverFactory = Callable[[EngineEndpoint], EngineDriver]


def driver_factory(config: ReceiverConfig) -> DriverFactory:
    """Return what makes a driver for each kind of engine, and raises `UnknownEngineKind`."""
    settings = DriverSettings(
        kv_policy=config.kv_policy,
        verify=config.verify,
        observe_timeout_s=config.observe_timeout_s,
        pause_timeout_s=config.pause_timeout_s,
        load_timeout_s=config.load_timeout_s,
        verify_timeout_s=config.verify_timeout_s,
    )

    def make(endpoint: EngineEndpoint) -> EngineDriver:
        match endpoint.kind, config.sglang_load:
            case "embedded", _:
                return EmbeddedDriver(endpoint.url, settings)
            case "sglang", "disk":
                return SglangDriver(endpoint.url, settings)
            case "sglang", "distributed":
                return SglangDistributedDriver(endpoint.url, settings, config.collective)
        raise UnknownEngineKind(
            f"engine {endpoint.url} is of kind {endpoint.kind!r}; this release drives 'embedded' "
            "and 'sglang'. Register it under one of them if it speaks that API"
        )

    return make
