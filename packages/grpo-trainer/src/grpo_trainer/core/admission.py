"""Which group may start now: paced admission under a staleness bound.

The bound is met by admission rather than by throwing finished work away. A group that starts now
finds the groups in flight and ready before it; groups train oldest first, `batch_groups` a step,
so the step that will train it is known in advance, and it starts only if that step is near enough.
With a bound of 0 this is synchronous training: nothing starts while a step is computed.

A group that is slower than the bound allows is overtaken: it blocks no step, and no start.

Nothing here counts: the pipeline's figures come from the book of groups, which is the one place
where groups change state.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

SLOW_TIMES = 3.0
"""A group that takes this many times as long as usual is slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRules:
    """What admission must keep to."""

    batch_groups: int
    """Groups that one optimizer step trains."""
    staleness_bound: int
    """Optimizer steps that may lie between the weights which sample a group and its training."""
    max_in_flight: int = 0
    """Most groups that may be at the engines at once; 0: no limit of its own."""
    pace_headroom: float = 2.0
    """Starts are spaced for this many times the measured rate of use; 0: not spaced."""

    def __post_init__(self) -> None:
        if self.batch_groups < 1 or self.staleness_bound < 0 or self.max_in_flight < 0:
            raise ValueError(
                "expected batch_groups >= 1, staleness_bound >= 0 and max_in_flight >= 0, found "
                f"{self.batch_groups}, {self.staleness_bound} and {self.max_in_flight}"
            )
        if self.pace_headroom != 0 and self.pace_headroom < 1:
            raise ValueError(
                f"pace_headroom must be 0 or at least 1, or starts fall behind the steps; found "
                f"{self.pace_headroom}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Where the groups are at one instant."""

    step: int
    """Optimizer steps of the newest published weights."""
    training: bool
    """Whether a step is being computed: the next batch then meets weights one step newer."""
    in_flight: int
    """Groups at the engines."""
    overdue: int = 0
    """Those of them that are too slow to count: see `count_overdue`."""
    ready: int
    """Groups that arrived and wait for a step, those being trained not among them."""
    steps_left: int
    """Steps still to be done, the one being computed not among them."""


class Hold(enum.StrEnum):
    """Why no group may start."""

    BOUND = "BOUND"
    """One more would be trained on weights too far from those that sample it."""
    IN_FLIGHT = "IN_FLIGHT"
    """`max_in_flight` groups are at the engines."""
    ENOUGH = "ENOUGH"
    """What is there covers the steps left."""
    PACE = "PACE"
    """The pace is not known yet: a start that works ahead waits for a group to arrive."""


@dataclass(frozen=True, slots=True)
class Start:
    """A group may start, on weights of at least `min_step` optimizer steps."""

    min_step: int


@dataclass(frozen=True, slots=True)
class Wait:
    """A group may start at `until_s`, to keep starts even."""

    until_s: float


@dataclass(frozen=True, slots=True)
class Blocked:
    """No group may start before something changes."""

    reason: Hold


@dataclass(frozen=True, slots=True)
class Pace:
    """When the last group started, and how fast groups are used up.

    Times are of any steady clock, in seconds.
    """

    last_start_s: float = -math.inf
    decided: int = 0
    """Groups decided since `measured_s`."""
    measured_s: float = math.nan
    """When the present measurement began; not a number before the first decision."""
    interval_s: float = 0.0
    """Smoothed time between two groups being used up; 0: not known yet."""

    def started(self, now_s: float) -> Pace:
        """Note that a group started."""
        return replace(self, last_start_s=now_s)

    def used(self, groups: int) -> Pace:
        """Note that groups were trained or skipped."""
        return replace(self, decided=self.decided + groups)

    def stepped(self, now_s: float, *, weight: float = 0.3) -> Pace:
        """Note the end of an optimizer step: take the rate of the time since the last one."""
        if math.isnan(self.measured_s) or not self.decided:
            return replace(self, measured_s=now_s, decided=0)
        found = max(0.0, now_s - self.measured_s) / self.decided
        smoothed = found if self.interval_s == 0 else self.interval_s
        interval_s = smoothed + weight * (found - smoothed)
        return replace(self, measured_s=now_s, decided=0, interval_s=interval_s)


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A group at an engine: the step that it started at, and when."""

    started_step: int
    placed_s: float


def count_overdue(
    rules: AdmissionRules,
    groups: Iterable[Outstanding],
    *,
    step: int,
    now_s: float,
    typical_s: float,
) -> int:
    """Count the groups in flight that are too slow to be waited for.

    Steps have passed them by more than the bound allows; or they take far longer than groups
    usually do, and are so few that the engines as a whole cannot be what is slow.

    Args:
        rules: The bound, and the size of a batch.
        groups: Those in flight.
        step: Optimizer steps of the newest published weights.
        now_s: On the clock of `placed_s`.
        typical_s: How long a group usually takes; 0: not known yet.
    """
    passed = slow = 0
    for group in groups:
        if group.started_step < step - rules.staleness_bound:
            passed += 1
        elif typical_s and now_s - group.placed_s > SLOW_TIMES * typical_s:
            slow += 1
    return passed + min(slow, rules.batch_groups)


def groups_before(pipeline: Pipeline) -> int:
    """Return how many groups will be trained before one that starts now."""
    return pipeline.in_flight - pipeline.overdue + pipeline.ready


def training_step_of_next(rules: AdmissionRules, pipeline: Pipeline) -> int:
    """Return the weights' step at which a group that starts now will be trained, at the latest.

    It counts every group before it as one that trains; a skipped one brings it forward.
    """
    return pipeline.step + pipeline.training + groups_before(pipeline) // rules.batch_groups


def next_start(
    rules: AdmissionRules, pipeline: Pipeline, pace: Pace, now_s: float
) -> Start | Wait | Blocked:
    """Decide whether one more group may start now.

    Starts that the next batch needs come at once. Those that work ahead are spaced evenly at the
    pace at which groups are used up, or the end of a step would release a whole batch of them
    against engines and sandboxes in one burst. Until that pace is known, one starts for each that
    arrives.
    """
    before = groups_before(pipeline)
    # A few more than are needed, so that the last step does not wait for the slowest group.
    spare = max(1, rules.batch_groups // 4)
    if pipeline.steps_left == 0 or before >= rules.batch_groups * pipeline.steps_left + spare:
        return Blocked(Hold.ENOUGH)
    if rules.max_in_flight and pipeline.in_flight >= rules.max_in_flight:
        return Blocked(Hold.IN_FLIGHT)
    trains_at = training_step_of_next(rules, pipeline)
    if trains_at - pipeline.step > rules.staleness_bound:
        return Blocked(Hold.BOUND)
    if before >= rules.batch_groups and rules.pace_headroom:
        if pace.interval_s == 0 and pipeline.in_flight >= rules.batch_groups:
            return Blocked(Hold.PACE)
        due_s = pace.last_start_s + pace.interval_s / rules.pace_headroom
        if now_s < due_s:
            return Wait(due_s)
    return Start(max(0, trains_at - rules.staleness_bound))
