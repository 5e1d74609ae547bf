"""Which engine serves a request, who waits for which, and when a lost engine may come back.

Pure: time is an argument, and health checks are made by the caller, who reports what they found.

A session stays with its engine, where its prefix is cached, as long as that engine is in and holds
a version that the request accepts. Else it moves to the least loaded engine that does. A request
that no engine can serve now waits until one can.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rollout_engine.core.concurrency import LimiterStatus, SlotQueue


class EngineState(enum.StrEnum):
    """Whether an engine gets requests."""

    IN = "in"
    OUT = "out"


class Availability(enum.StrEnum):
    """Whether a version can be had."""

    NOW = "now"
    LATER = "later"
    """No engine that is in holds it yet, or none is in."""
    NEVER = "never"
    """Every engine that is in has gone past it."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Which versions of the weights a request accepts; 0 means no demand."""

    minimum: int = 0
    exactly: int = 0

    def met_by(self, version: int) -> bool:
        """Whether tokens of this version are accepted."""
        return version >= self.minimum and self.exactly in (0, version)


ANY_VERSION = Demand()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingPolicy:
    """Limits and times of the router, in seconds.

    Attributes:
        max_in_flight: Requests at one engine at once; more wait. 0: no limit.
        check_interval_s: Between two checks of an engine that is in.
        first_retry_s: From an engine's loss to the first check of whether it is back.
        longest_retry_s: The time between these checks doubles up to this.
    """

    max_in_flight: int = 256
    check_interval_s: float = 2.0
    first_retry_s: float = 0.5
    longest_retry_s: float = 15.0

    def __post_init__(self) -> None:
        if self.max_in_flight < 0:
            raise ValueError(f"max_in_flight must be >= 0 (0: none), got {self.max_in_flight}")
        if not 0 < self.first_retry_s <= self.longest_retry_s or self.check_interval_s <= 0:
            raise ValueError(
                "check_interval_s and first_retry_s must be positive and longest_retry_s no less "
                f"than first_retry_s, got {self}"
            )


@dataclass(frozen=True, slots=True)
class Grant:
    """A request may go to an engine now."""

    ticket: int
    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """An engine as the router sees it.

    Attributes:
        reason: Why it is out.
        elsewhere: Requests that others have at it, as of the last check.
    """

    name: str
    state: EngineState
    reason: str
    version: int
    sessions: int
    in_flight: int
    waiting: int
    elsewhere: int


@dataclass(slots=True, eq=False)
class _Engine:
    name: str
    order: int
    slots: SlotQueue[int]
    state: EngineState = EngineState.OUT
    reason: str = "not checked yet"
    version: int = 0
    elsewhere: int = 0
    sessions: set[str] = field(default_factory=set)
    failures: int = 0
    next_check_s: float = 0.0

    @property
    def load(self) -> tuple[int, int, int]:
        at_work = self.slots.in_use + self.slots.waiting + self.elsewhere
        return (at_work + len(self.sessions), at_work, self.order)

    def serves(self, demand: Demand) -> bool:
        return self.state is EngineState.IN and demand.met_by(self.version)


@dataclass(slots=True, eq=False)
class _Ticket:
    session: str
    demand: Demand
    since_s: float
    engine: str | None = None


class Router:
    """Places sessions, queues requests, drops and readmits engines.

    Every engine starts out and comes in with its first good check.

    Args:
        engines: Names, in the order of preference among equals.
        policy: Limits and times.
    """

    def __init__(self, engines: Sequence[str], policy: RoutingPolicy) -> None:
        if len(set(engines)) < len(engines):
            raise ValueError(f"engines must be different, got {list(engines)}")
        self._policy = policy
        self._engines = {
            name: _Engine(name, order, SlotQueue(name, policy.max_in_flight))
            for order, name in enumerate(engines)
        }
        self._homes: dict[str, str] = {}
        self._tickets: dict[int, _Ticket] = {}
        self._unplaced: dict[int, None] = {}

    def request(self, ticket: int, session: str, demand: Demand, now_s: float) -> str | None:
        """Ask for an engine; return its name, or None: a later call's `Grant` brings it."""
        if ticket in self._tickets:
            raise ValueError(f"ticket {ticket} is in use")
        self._tickets[ticket] = _Ticket(session, demand, now_s)
        return self._place(ticket, now_s)

    def release(self, ticket: int, now_s: float) -> list[Grant]:
        """Give up a request, whether it was granted, waits, or is gone with its engine."""
        entry = self._tickets.pop(ticket, None)
        if entry is None:
            return []
        self._unplaced.pop(ticket, None)
        if entry.engine is None:
            return []
        return self._leave(self._engines[entry.engine], ticket, now_s)

    def end_session(self, session: str) -> None:
        """Forget where a session's prefix is."""
        home = self._homes.pop(session, None)
        if home is not None:
            self._engines[home].sessions.discard(session)

    def failed(self, name: str, reason: str, now_s: float) -> list[Grant]:
        """Take an engine out: its sessions are homeless, those who wait for it go elsewhere.

        Requests in flight at it keep their slots until they are released.
        """
        engine = self._engines[name]
        retry_s = self._policy.first_retry_s * 2.0 ** min(engine.failures, 30)
        engine.next_check_s = now_s + min(retry_s, self._policy.longest_retry_s)
        engine.failures += 1
        engine.reason = reason
        if engine.state is EngineState.OUT:
            return []
        engine.state = EngineState.OUT
        for session in engine.sessions:
            del self._homes[session]
        engine.sessions.clear()
        return self._displace(engine, now_s)

    def checked(self, name: str, version: int, now_s: float, *, elsewhere: int = 0) -> list[Grant]:
        """Record a good check, with the version found: the engine is in.

        An engine that is not well, or whose version may not be served, is to be `failed` instead.
        """
        engine = self._engines[name]
        came_in = engine.state is EngineState.OUT
        engine.state = EngineState.IN
        engine.failures = 0
        engine.reason = ""
        engine.elsewhere = elsewhere
        engine.next_check_s = now_s + self._policy.check_interval_s
        grants = self.saw_version(name, version, now_s)
        return grants + (self._place_waiting(now_s) if came_in else [])

    def saw_version(self, name: str, version: int, now_s: float) -> list[Grant]:
        """Record the version that an engine was seen to hold, in whatever reply."""
        engine = self._engines[name]
        if engine.version == version:
            return []
        engine.version = version
        if engine.state is EngineState.OUT:
            return []
        return self._displace(engine, now_s) + self._place_waiting(now_s)

    def next_check_s(self, name: str) -> float:
        """Return when an engine should be checked next."""
        return self._engines[name].next_check_s

    def expedite(self, now_s: float) -> None:
        """Let every engine that is in be checked by this time."""
        for engine in self._engines.values():
            if engine.state is EngineState.IN:
                engine.next_check_s = min(engine.next_check_s, now_s)

    def availability(self, demand: Demand) -> Availability:
        """Say whether tokens of such a version can be had."""
        ins = [e for e in self._engines.values() if e.state is EngineState.IN]
        if any(demand.met_by(engine.version) for engine in ins):
            return Availability.NOW
        gone = demand.exactly and ins and all(e.version > demand.exactly for e in ins)
        return Availability.NEVER if gone else Availability.LATER

    def unservable(self) -> list[int]:
        """Name the tickets that wait for a version which every engine has gone past."""
        return [
            ticket
            for ticket in self._unplaced
            if self.availability(self._tickets[ticket].demand) is Availability.NEVER
        ]

    def demand_of(self, ticket: int) -> Demand:
        """Return which versions a waiting request accepts."""
        return self._tickets[ticket].demand

    def versions(self) -> set[int]:
        """Return the versions of the engines that are in."""
        return {e.version for e in self._engines.values() if e.state is EngineState.IN}

    def view(self) -> tuple[EngineView, ...]:
        """Return every engine as it stands."""
        return tuple(
            EngineView(
                name=engine.name,
                state=engine.state,
                reason=engine.reason,
                version=engine.version,
                sessions=len(engine.sessions),
                in_flight=engine.slots.in_use,
                waiting=engine.slots.waiting,
                elsewhere=engine.elsewhere,
            )
            for engine in self._engines.values()
        )

    def limiters(self, now_s: float) -> tuple[LimiterStatus, ...]:
        """Return each engine's queue, and last that of requests which no engine can serve."""
        waits = [now_s - self._tickets[ticket].since_s for ticket in self._unplaced]
        homeless = LimiterStatus(
            name="no engine",
            limit=0,
            in_use=0,
            waiting=len(waits),
            wait_p50_s=sorted(waits)[len(waits) // 2] if waits else 0.0,
            wait_max_s=max(waits, default=0.0),
        )
        return (*(e.slots.status(now_s) for e in self._engines.values()), homeless)

    def _place(self, ticket: int, now_s: float) -> str | None:
        """Grant a ticket, or let it wait at an engine or among the unplaced."""
        entry = self._tickets[ticket]
        engine = self._home(entry.session, entry.demand)
        if engine is None:
            entry.engine = None
            self._unplaced[ticket] = None
            return None
        entry.engine = engine.name
        self._unplaced.pop(ticket, None)
        # The wait counts from the first request, however often the ticket moved.
        if engine.slots.request(ticket, (), entry.since_s):
            return engine.name
        return None

    def _home(self, session: str, demand: Demand) -> _Engine | None:
        home = self._homes.get(session)
        if home is not None and self._engines[home].serves(demand):
            return self._engines[home]
        fitting = [engine for engine in self._engines.values() if engine.serves(demand)]
        if not fitting:
            return None
        best = min(fitting, key=lambda engine: engine.load)
        self.end_session(session)
        self._homes[session] = best.name
        best.sessions.add(session)
        return best

    def _leave(self, engine: _Engine, ticket: int, now_s: float) -> list[Grant]:
        if not engine.slots.holds(ticket):
            engine.slots.withdraw(ticket)
            return []
        grants: list[Grant] = []
        granted = engine.slots.release(ticket, now_s)
        while granted:
            other = granted.pop(0)
            if engine.serves(self._tickets[other].demand):
                grants.append(Grant(other, engine.name))
            else:
                granted += engine.slots.release(other, now_s)
                grants += self._again([other], now_s)
        return grants

    def _displace(self, engine: _Engine, now_s: float) -> list[Grant]:
        """Move those who wait for an engine that can't serve them any more."""
        moved = [
            ticket
            for ticket, entry in self._tickets.items()
            if entry.engine == engine.name
            and not engine.slots.holds(ticket)
            and not engine.serves(entry.demand)
        ]
        for ticket in moved:
            engine.slots.withdraw(ticket)
        return self._again(moved, now_s)

    def _place_waiting(self, now_s: float) -> list[Grant]:
        return self._again(list(self._unplaced), now_s)

    def _again(self, tickets: Iterable[int], now_s: float) -> list[Grant]:
        grants = []
        for ticket in tickets:
            engine = self._place(ticket, now_s)
            if engine is not None:
                grants.append(Grant(ticket, engine))
        return grants


__all__ = [
    "ANY_VERSION",
    "Availability",
    "Demand",
    "EngineState",
    "EngineView",
    "Grant",
    "Router",
    "RoutingPolicy",
]
