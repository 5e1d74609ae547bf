"""The limiters as metrics: one gauge each for what is in use, what is allowed and who waits."""

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Observation
from service_kit.telemetry import meter

from sandbox_client.core.limits import LimiterStatus
from sandbox_client.manager import SandboxManager

__all__ = ["register_gauges"]


def register_gauges(manager: SandboxManager) -> None:
    """Registers the gauges; without telemetry this does nothing."""

    def observe(
        value: Callable[[LimiterStatus], float],
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def callback(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(value(s), {"limiter": s.name}) for s in manager.limiters()]

        return callback

    made = meter("sandbox_client")
    for name, unit, value in (
        ("sandbox.limiter.in_use", "1", lambda s: s.in_use),
        ("sandbox.limiter.limit", "1", lambda s: s.limit),
        ("sandbox.limiter.waiting", "1", lambda s: float(s.waiting)),
        ("sandbox.limiter.wait.max", "s", lambda s: s.wait_max_s),
    ):
        made.create_observable_gauge(name, callbacks=[observe(value)], unit=unit)
