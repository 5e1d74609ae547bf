"""Which driver an engine gets."""

from collections.abc import Callable

from weight_sync.config import ReceiverConfig
from weight_sync.core.registry import EngineEndpoint
from weight_sync.drivers.base import EngineDriver
from weight_sync.drivers.embedded import DriverSettings, EmbeddedDriver
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
        if endpoint.kind != "embedded":
            raise UnknownEngineKind(
                f"engine {endpoint.url} is of kind {endpoint.kind!r}; this release drives "
                "'embedded'. Register it under that kind if it speaks the same API"
            )
        return EmbeddedDriver(endpoint.url, settings)

    return make
