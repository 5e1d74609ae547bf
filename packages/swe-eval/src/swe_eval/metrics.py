"""The line of graders as metrics: what is in use, what is allowed, who waits, what came of it."""

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Observation
from service_kit.telemetry import meter

from swe_eval.grading.run import Grader


def register_gauges(grader: Grader) -> None:
    """Registers the gauges; without telemetry this does nothing."""

    def observe(value: Callable[[], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def callback(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(value())]

        return callback

    limiter = grader.limiter
    made = meter("swe_eval")
    for name, unit, value in (
        ("eval.grading.in_use", "1", lambda: float(limiter.in_use)),
        ("eval.grading.limit", "1", lambda: float(limiter.limit)),
        ("eval.grading.waiting", "1", lambda: float(limiter.waiting)),
        ("eval.grading.wait.max", "s", lambda: max(limiter.waits_s, default=0.0)),
    ):
        made.create_observable_gauge(name, callbacks=[observe(value)], unit=unit)
    for name, count in (
        ("eval.gradings", lambda: float(grader.graded)),
        ("eval.grading.faults", lambda: float(grader.faulted)),
    ):
        made.create_observable_counter(name, callbacks=[observe(count)], unit="1")
