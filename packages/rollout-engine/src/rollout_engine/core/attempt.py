"""The life of one try at an attempt: one state, one transition function.

    LEASED                     --Started-->                   RUNNING
    RUNNING                    --Submitted | LimitReached-->  GRADING
    GRADING                    --Graded | NothingToGrade-->   ENDED
    LEASED | RUNNING | GRADING --Faulted | Cancelled-->       ENDED

`TurnTaken` keeps an attempt RUNNING. Every other pair of state and event is illegal.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from rollout_engine.types import Fault, LimitKind, Outcome


class Phase(enum.StrEnum):
    """Where a try stands."""

    LEASED = "LEASED"
    RUNNING = "RUNNING"
    GRADING = "GRADING"
    ENDED = "ENDED"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a try ended. Exactly one outcome, with what belongs to it."""

    outcome: Outcome
    reward: float = 0.0
    graded: bool = False
    limit: LimitKind | None = None
    fault: Fault | None = None
    grade_reason: str = ""


@dataclass(frozen=True, slots=True)
class AttemptState:
    """State of a try; `limit` is what ended its turns, `ending` is set once ENDED."""

    phase: Phase = Phase.LEASED
    turns: int = 0
    limit: LimitKind | None = None
    ending: Ending | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The sandbox is up and the prompt is rendered."""


@dataclass(frozen=True, slots=True)
class TurnTaken:
    """The policy has sampled one more message."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """The policy says it is done."""


@dataclass(frozen=True, slots=True)
class LimitReached:
    """The policy has used up a limit of its own."""

    kind: LimitKind


@dataclass(frozen=True, slots=True)
class Graded:
    """The grader has a verdict."""

    solved: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NothingToGrade:
    """The policy changed nothing."""

    reason: str = "empty_diff"


@dataclass(frozen=True, slots=True)
class Faulted:
    """Infrastructure failed."""

    fault: Fault


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The run ended or the group was withdrawn."""


AttemptEvent = (
    Started | TurnTaken | Submitted | LimitReached | Graded | NothingToGrade | Faulted | Cancelled
)


class IllegalTransitionError(RuntimeError):
    """An event came in a state that does not allow it: a bug of the caller."""


def transition(state: AttemptState, event: AttemptEvent) -> AttemptState:
    """Give the state after an event.

    Raises:
        IllegalTransitionError: The event is not legal in this state.

    """
    match state.phase, event:
        case Phase.LEASED, Started():
            return replace(state, phase=Phase.RUNNING)
        case Phase.RUNNING, TurnTaken():
            return replace(state, turns=state.turns + 1)
        case Phase.RUNNING, Submitted():
            return replace(state, phase=Phase.GRADING)
        case Phase.RUNNING, LimitReached(kind):
            return replace(state, phase=Phase.GRADING, limit=kind)
        case Phase.GRADING, Graded(solved, reason):
            return _ended(state, _judged(state, solved=solved, graded=True, reason=reason))
        case Phase.GRADING, NothingToGrade(reason):
            return _ended(state, _judged(state, solved=False, graded=False, reason=reason))
        case ((Phase.LEASED | Phase.RUNNING | Phase.GRADING), Faulted(fault)):
            return _ended(state, Ending(Outcome.FAULT, fault=fault))
        case ((Phase.LEASED | Phase.RUNNING | Phase.GRADING), Cancelled()):
            return _ended(state, Ending(Outcome.CANCELLED))
    raise IllegalTransitionError(f"{type(event).__name__} is not legal in {state.phase}")


def _judged(state: AttemptState, *, solved: bool, graded: bool, reason: str) -> Ending:
    if state.limit is not None:
        outcome = Outcome.LIMIT_REACHED
    else:
        outcome = Outcome.SOLVED if solved else Outcome.UNSOLVED
    return Ending(outcome, 1.0 if solved else 0.0, graded, state.limit, grade_reason=reason)


def _ended(state: AttemptState, ending: Ending) -> AttemptState:
    return replace(state, phase=Phase.ENDED, ending=ending)


__all__ = [
    "AttemptEvent",
    "AttemptState",
    "Cancelled",
    "Ending",
    "Faulted",
    "Graded",
    "IllegalTransitionError",
    "LimitReached",
    "NothingToGrade",
    "Phase",
    "Started",
    "Submitted",
    "TurnTaken",
    "transition",
]
