"""Spans and metrics of a stage. Without a collector they cost next to nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cached_property

from opentelemetry import metrics, trace
from rollout_engine.types import Decision
from service_kit.telemetry import meter, parent_context, tracer

NAME = "grpo-trainer"


class GroupSpans:
    """One span for each group, from its assignment to its decision.

    The engine hangs the attempts' spans under it; a step hangs itself under each group it trained,
    so that one trace goes from a prompt to the optimizer step.
    """

    def __init__(self) -> None:
        self._open: dict[str, trace.Span] = {}

    def begin(self, group_id: str, task_id: str) -> str:
        """Start a group's span and return its `traceparent`; empty while nothing is recorded."""
        span = tracer(NAME).start_span(
            "group",
            context=parent_context(""),
            attributes={"group.id": group_id, "task.id": task_id},
        )
        self._open[group_id] = span
        context = span.get_span_context()
        if not context.is_valid:
            return ""
        flags = int(context.trace_flags)
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"

    def step(
        self, traceparent: str, *, began_s: float, step: int, version: int, attempts: int
    ) -> None:
        """Record that an optimizer step trained a group.

        Args:
            traceparent: Of the group.
            began_s: Unix time.
            step: Of the stage.
            version: Number of the weights that came of it.
            attempts: Of the group, that were trained.
        """
        span = tracer(NAME).start_span(
            "grpo.step",
            context=parent_context(traceparent),
            start_time=int(began_s * 1e9),
            attributes={"step": step, "version.number": version, "attempts": attempts},
        )
        span.end()

    def end(self, group_id: str, decision: Decision) -> None:
        """End a group's span; of an earlier life of the trainer there is none."""
        span = self._open.pop(group_id, None)
        if span is not None:
            span.set_attribute("decision", decision.value)
            span.end()

    def abandon(self) -> None:
        """End what is open, without a decision."""
        for span in self._open.values():
            span.end()
        self._open.clear()


class Instruments:
    """Metrics; made at first use, after telemetry is set up."""

    @cached_property
    def _meter(self) -> metrics.Meter:
        return meter(NAME)

    @cached_property
    def _time(self) -> metrics.Histogram:
        return self._meter.create_histogram(
            "grpo_trainer.step.duration", unit="s", description="Time of a step by what it went for"
        )

    @cached_property
    def _groups(self) -> metrics.Counter:
        return self._meter.create_counter(
            "grpo_trainer.groups", unit="{group}", description="Groups by decision"
        )

    @cached_property
    def _staleness(self) -> metrics.Histogram:
        return self._meter.create_histogram(
            "grpo_trainer.staleness",
            unit="{step}",
            description="Mean staleness of a step's attempts",
        )

    @cached_property
    def _tokens(self) -> metrics.Counter:
        return self._meter.create_counter(
            "grpo_trainer.tokens", unit="{token}", description="Tokens that were trained on"
        )

    def stepped(self, values: Mapping[str, float], counts: Mapping[str, int]) -> None:
        """Record a step's figures."""
        for name, value in values.items():
            if name.startswith("time."):
                part = name.removeprefix("time.").removesuffix("_s")
                self._time.record(value, {"part": part})
        for name, count in counts.items():
            if name.startswith("decision."):
                self._groups.add(count, {"decision": name.removeprefix("decision.")})
        if "staleness.mean" in values:
            self._staleness.record(values["staleness.mean"])
        self._tokens.add(counts.get("tokens_trained", 0))


def unix_time_s() -> float:
    """Return the time that spans are stamped with."""
    return time.time()
