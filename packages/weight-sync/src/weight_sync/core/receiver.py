"""What a receiver may believe about one engine, and what it does next.

The invariant: an engine that reports v holds exactly the bytes of v, or reports nothing. So `held`
is set only by proof (a verified activation, or checksums that match), it is dropped before an
activation begins, and nothing but a full load leaves POISONED.

    from        event           to          held
    UNKNOWN     Prepare         PREPARING   nothing
                Verified(v)     SERVING     v
    SERVING     Prepare         PREPARING   kept
    PREPARING   Prepare         PREPARING   kept       (a newer target)
                Prepared        READY       kept
                PrepareFailed   SERVING, UNKNOWN or POISONED: where it came from
    READY       Prepare         PREPARING   kept       (a newer target)
                Activate        ACTIVATING  nothing
    ACTIVATING  Activated       SERVING     the target
                ActivateFailed  POISONED    nothing
    POISONED    Prepare         PREPARING   nothing
    any but ACTIVATING: Lost    UNKNOWN     nothing    (gone, restarted, or changed by others)

Losing an engine while ACTIVATING is an activation that failed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from weight_sync.core.manifest import PolicyVersion
from weight_sync.errors import IllegalTransition


class Phase(StrEnum):
    """Where an engine stands; see the module's table."""

    UNKNOWN = "UNKNOWN"
    SERVING = "SERVING"
    PREPARING = "PREPARING"
    READY = "READY"
    ACTIVATING = "ACTIVATING"
    POISONED = "POISONED"


@dataclass(frozen=True, slots=True)
class EngineState:
    """One engine as its receiver sees it."""

    phase: Phase = Phase.UNKNOWN
    held: PolicyVersion | None = None
    """The version it holds, proven; None: it reports nothing."""
    target: PolicyVersion | None = None
    """The version it is being brought to."""
    poisoned: bool = False
    """An activation failed and no full load has repaired it yet."""
    error: str = ""
    """What went wrong last; empty once it serves again."""

    def __post_init__(self) -> None:
        moving = self.phase in (Phase.PREPARING, Phase.READY, Phase.ACTIVATING)
        legal = (
            moving == (self.target is not None)
            and (self.held is not None or self.phase is not Phase.SERVING)
            and (self.held is None or self.phase in (Phase.SERVING, Phase.PREPARING, Phase.READY))
            and not (self.poisoned and self.held is not None)
        )
        if not legal:
            raise IllegalTransition(f"an engine cannot be {self!r}")


@dataclass(frozen=True, slots=True)
class Prepare:
    """The receiver starts to prepare `target` while the engine goes on serving."""

    target: PolicyVersion


@dataclass(frozen=True, slots=True)
class Prepared:
    """The shadow copy of the target is complete and verified."""


@dataclass(frozen=True, slots=True)
class PrepareFailed:
    """The target could not be fetched, decoded or verified; the engine was not touched."""

    error: str


@dataclass(frozen=True, slots=True)
class Activate:
    """The receiver is about to touch the engine's weights."""


@dataclass(frozen=True, slots=True)
class Activated:
    """The engine reports the target's label, and its weights match the manifest."""


@dataclass(frozen=True, slots=True)
class ActivateFailed:
    """Something failed after the engine was touched: its weights may be torn."""

    error: str


@dataclass(frozen=True, slots=True)
class Verified:
    """An engine of unknown contents proved, by checksums, that it holds `version`."""

    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class Lost:
    """What the engine holds is no longer known: gone, restarted, or changed by others."""

    error: str


Event = Prepare | Prepared | PrepareFailed | Activate | Activated | ActivateFailed | Verified | Lost


def transition(state: EngineState, event: Event) -> EngineState:
    """Return the state after an event; the one place where an engine's state changes.

    Raises:
        IllegalTransition: the table has no such event in this phase.
    """
    move = _TABLE.get((state.phase, type(event)))
    if move is None:
        raise IllegalTransition(f"{type(event).__name__} cannot happen to an engine in {state!r}")
    return move(state, event)


def _prepare(state: EngineState, event: Prepare) -> EngineState:
    return EngineState(Phase.PREPARING, state.held, event.target, state.poisoned, state.error)


def _prepared(state: EngineState, event: Prepared) -> EngineState:
    return EngineState(Phase.READY, state.held, state.target, state.poisoned, state.error)


def _prepare_failed(state: EngineState, event: PrepareFailed) -> EngineState:
    if state.held is not None:
        return EngineState(Phase.SERVING, state.held, error=event.error)
    phase = Phase.POISONED if state.poisoned else Phase.UNKNOWN
    return EngineState(phase, poisoned=state.poisoned, error=event.error)


def _activate(state: EngineState, event: Activate) -> EngineState:
    # `held` goes before the first byte changes: from here on the engine reports nothing.
    return EngineState(Phase.ACTIVATING, target=state.target, poisoned=state.poisoned)


def _activated(state: EngineState, event: Activated) -> EngineState:
    return EngineState(Phase.SERVING, held=state.target)


def _activate_failed(state: EngineState, event: ActivateFailed) -> EngineState:
    return EngineState(Phase.POISONED, poisoned=True, error=event.error)


def _verified(state: EngineState, event: Verified) -> EngineState:
    return EngineState(Phase.SERVING, held=event.version)


def _lost(state: EngineState, event: Lost) -> EngineState:
    return EngineState(Phase.UNKNOWN, error=event.error)


_TABLE: dict[tuple[Phase, type], Callable[[EngineState, Any], EngineState]] = {
    (Phase.UNKNOWN, Prepare): _prepare,
    (Phase.UNKNOWN, Verified): _verified,
    (Phase.UNKNOWN, Lost): _lost,
    (Phase.SERVING, Prepare): _prepare,
    (Phase.SERVING, Lost): _lost,
    (Phase.PREPARING, Prepare): _prepare,
    (Phase.PREPARING, Prepared): _prepared,
    (Phase.PREPARING, PrepareFailed): _prepare_failed,
    (Phase.PREPARING, Lost): _lost,
    (Phase.READY, Prepare): _prepare,
    (Phase.READY, Activate): _activate,
    (Phase.READY, Lost): _lost,
    (Phase.ACTIVATING, Activated): _activated,
    (Phase.ACTIVATING, ActivateFailed): _activate_failed,
    (Phase.POISONED, Prepare): _prepare,
    (Phase.POISONED, Lost): _lost,
}


class Attempts:
    """Tries to get to a version, and where they got stuck."""

    def __init__(self, stuck_after: int) -> None:
        """Count from nothing.

        Args:
            stuck_after: so many failures in a row, of whichever versions, are no passing matter.
        """
        self._stuck_after = stuck_after
        self._failures = 0
        self.stuck_at = 0
        """The version that was tried last, once stuck; 0: not stuck."""

    def failed(self, number: int) -> None:
        """Take note that a version's bytes could not be had, by any way."""
        self._failures += 1
        if self._failures >= self._stuck_after:
            self.stuck_at = number

    def succeeded(self) -> None:
        """Take note that some version was got to: whatever comes next is built on it."""
        self._failures = self.stuck_at = 0


def supersedes(offered: PolicyVersion, known: PolicyVersion | None) -> bool:
    """Say whether an announcement replaces the newest version known so far.

    Within a run numbers only rise, whatever the incarnation: what an older publisher, or a stream
    that was opened again, tells about a lower number is of the past. Which run counts is the
    service's word alone.
    """
    return known is None or offered.run != known.run or offered.number > known.number


def wants(state: EngineState, newest: PolicyVersion | None) -> bool:
    """Say whether an engine should be brought to the newest version now.

    Versions in between are skipped: only the newest is ever a target.
    """
    if newest is None or state.phase is Phase.ACTIVATING:
        return False
    return state.held != newest


def doubt(state: EngineState, label: str | None) -> Lost | None:
    """Compare what an engine says of itself with what is believed of it.

    Args:
        state: what the receiver believes.
        label: the engine's `weight_version`; None: it did not answer.

    Returns:
        The event to apply, or None where the two agree or nothing is believed.
    """
    if state.phase is Phase.ACTIVATING or (state.held is None and label is not None):
        return None
    if label is None:
        return Lost("the engine does not answer")
    if state.held is not None and label != state.held.label:
        return Lost(
            f"the engine reports weight_version {label!r}, expected {state.held.label!r}: "
            "it restarted, or something else changed its weights"
        )
    return None
