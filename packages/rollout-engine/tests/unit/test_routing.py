from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rollout_engine.core.routing import (
    ANY_VERSION,
    Availability,
    Demand,
    EngineState,
    Grant,
    Router,
    RoutingPolicy,
)

POLICY = RoutingPolicy(
    max_in_flight=2, check_interval_s=2.0, first_retry_s=0.5, longest_retry_s=3.0
)


def router(*versions: int, policy: RoutingPolicy = POLICY) -> Router:
    made = Router([f"e{i}" for i in range(len(versions))], policy)
    for index, version in enumerate(versions):
        made.checked(f"e{index}", version, 0.0)
    return made


def test_an_engine_gets_nothing_before_its_first_good_check() -> None:
    made = Router(["e0"], POLICY)
    assert made.request(1, "s", ANY_VERSION, 0.0) is None
    assert made.next_check_s("e0") <= 0.0
    assert made.checked("e0", 1, 0.1) == [Grant(1, "e0")]


def test_new_sessions_go_to_the_least_loaded_engine_and_stay_there() -> None:
    made = router(1, 1)
    assert made.request(1, "a", ANY_VERSION, 0.0) == "e0"
    assert made.request(2, "b", ANY_VERSION, 0.0) == "e1"
    made.release(1, 1.0)
    made.release(2, 1.0)
    # e1 is idle too now, yet the session's prefix is on e0.
    assert made.request(3, "a", ANY_VERSION, 1.0) == "e0"
    assert made.request(4, "a", ANY_VERSION, 1.0) == "e0"


def test_what_others_have_at_an_engine_counts_as_load() -> None:
    made = router(1, 1)
    made.checked("e0", 1, 0.0, elsewhere=5)
    assert made.request(1, "a", ANY_VERSION, 0.0) == "e1"


def test_a_session_waits_for_its_own_engine_rather_than_leave_its_prefix() -> None:
    made = router(1, 1)
    assert made.request(1, "a", ANY_VERSION, 0.0) == "e0"
    assert made.request(2, "a", ANY_VERSION, 0.0) == "e0"
    assert made.request(3, "a", ANY_VERSION, 0.0) is None
    assert made.limiters(4.0)[0].waiting == 1
    assert made.limiters(4.0)[0].wait_max_s == 4.0
    assert made.release(1, 4.0) == [Grant(3, "e0")]


def test_a_lost_engine_sends_its_waiting_requests_and_sessions_elsewhere() -> None:
    made = router(1, 1)
    for ticket in (1, 2, 3):
        made.request(ticket, "a", ANY_VERSION, 0.0)
    assert made.failed("e0", "connection refused", 1.0) == [Grant(3, "e1")]
    assert made.view()[0].state is EngineState.OUT
    assert made.view()[0].reason == "connection refused"
    assert made.request(4, "a", ANY_VERSION, 1.0) == "e1"
    # The two that were in flight at it end in their own time and free nothing elsewhere.
    assert made.release(1, 2.0) == []


def test_checks_of_a_lost_engine_back_off_up_to_a_limit() -> None:
    made = router(1)
    times = []
    now_s = 10.0
    for _ in range(6):
        made.failed("e0", "down", now_s)
        times.append(made.next_check_s("e0") - now_s)
        now_s = made.next_check_s("e0")
    assert times == [0.5, 1.0, 2.0, 3.0, 3.0, 3.0]
    made.checked("e0", 1, now_s)
    assert made.next_check_s("e0") == now_s + 2.0
    made.failed("e0", "down again", now_s)
    assert made.next_check_s("e0") == now_s + 0.5


def test_a_request_moves_its_session_to_an_engine_with_the_version_it_needs() -> None:
    made = router(1, 2)
    assert made.request(1, "a", ANY_VERSION, 0.0) == "e0"
    assert made.request(2, "a", Demand(minimum=2), 0.0) == "e1"
    assert made.request(3, "a", ANY_VERSION, 0.0) == "e1"


def test_a_request_for_a_version_that_is_coming_waits_for_it() -> None:
    made = router(1, 1)
    assert made.request(1, "a", Demand(minimum=2), 0.0) is None
    assert made.availability(Demand(minimum=2)) is Availability.LATER
    assert made.limiters(1.5)[-1].waiting == 1
    assert made.saw_version("e1", 2, 2.0) == [Grant(1, "e1")]


def test_a_pinned_version_that_every_engine_has_passed_is_never_to_be_had() -> None:
    made = router(5, 4)
    assert made.availability(Demand(exactly=4)) is Availability.NOW
    assert made.request(1, "a", Demand(exactly=4), 0.0) == "e1"
    assert made.request(2, "a", Demand(exactly=4), 0.0) == "e1"
    assert made.request(3, "a", Demand(exactly=4), 0.0) is None
    assert made.unservable() == []
    made.saw_version("e1", 5, 1.0)
    assert made.availability(Demand(exactly=4)) is Availability.NEVER
    assert made.unservable() == [3]
    # With no engine in, nobody knows what will come back.
    made.failed("e0", "", 2.0)
    made.failed("e1", "", 2.0)
    assert made.availability(Demand(exactly=4)) is Availability.LATER


def test_a_slot_is_not_given_to_a_request_whose_version_has_gone_while_it_waited() -> None:
    made = router(1, policy=RoutingPolicy(max_in_flight=1))
    made.request(1, "a", ANY_VERSION, 0.0)
    made.request(2, "b", Demand(exactly=1), 0.0)
    made.request(3, "c", ANY_VERSION, 0.0)
    made.saw_version("e0", 2, 1.0)
    assert made.release(1, 2.0) == [Grant(3, "e0")]
    assert made.unservable() == [2]


def test_a_withdrawn_request_is_never_granted() -> None:
    made = router(1, policy=RoutingPolicy(max_in_flight=1))
    made.request(1, "a", ANY_VERSION, 0.0)
    made.request(2, "b", ANY_VERSION, 0.0)
    assert made.release(2, 1.0) == []
    assert made.release(1, 1.0) == []
    assert made.request(3, "c", ANY_VERSION, 1.0) == "e0"


def test_an_ended_session_may_go_anywhere() -> None:
    made = router(1, 1)
    made.request(1, "a", ANY_VERSION, 0.0)
    made.request(2, "b", ANY_VERSION, 0.0)
    made.end_session("a")
    made.release(1, 1.0)
    made.request(3, "c", ANY_VERSION, 1.0)
    assert made.request(4, "a", ANY_VERSION, 1.0) in ("e0", "e1")
    made.end_session("unknown")


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="max_in_flight"):
        RoutingPolicy(max_in_flight=-1)
    with pytest.raises(ValueError, match="longest_retry_s"):
        RoutingPolicy(first_retry_s=5, longest_retry_s=1)
    with pytest.raises(ValueError, match="different"):
        Router(["e", "e"], POLICY)


ENGINES = ("e0", "e1", "e2")
DEMANDS = st.builds(Demand, minimum=st.integers(0, 3), exactly=st.integers(0, 3))


class Traffic(RuleBasedStateMachine):
    """Random requests, losses and updates, against what must always hold."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(ENGINES, POLICY)
        self.now_s = 0.0
        self.next_ticket = 0
        self.demands: dict[int, Demand] = {}
        self.granted: dict[int, str] = {}
        self.versions = dict.fromkeys(ENGINES, 0)
        self.ins: set[str] = set()

    def took(self, grants: list[Grant]) -> None:
        for grant in grants:
            assert grant.ticket in self.demands
            assert grant.ticket not in self.granted
            assert grant.engine in self.ins
            assert self.demands[grant.ticket].met_by(self.versions[grant.engine])
            self.granted[grant.ticket] = grant.engine

    @rule(session=st.sampled_from("abcdefgh"), demand=DEMANDS)
    def ask(self, session: str, demand: Demand) -> None:
        ticket, self.next_ticket = self.next_ticket, self.next_ticket + 1
        self.demands[ticket] = demand
        engine = self.router.request(ticket, session, demand, self.now_s)
        if engine is not None:
            self.took([Grant(ticket, engine)])

    @precondition(lambda self: self.demands)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.demands)))
        del self.demands[ticket]
        self.granted.pop(ticket, None)
        self.took(self.router.release(ticket, self.now_s))

    @rule(engine=st.sampled_from(ENGINES))
    def fail(self, engine: str) -> None:
        self.ins.discard(engine)
        self.took(self.router.failed(engine, "down", self.now_s))

    @rule(engine=st.sampled_from(ENGINES), version=st.integers(0, 3))
    def check(self, engine: str, version: int) -> None:
        self.ins.add(engine)
        self.versions[engine] = version
        self.took(self.router.checked(engine, version, self.now_s))

    @rule(engine=st.sampled_from(ENGINES), version=st.integers(0, 3))
    def see_version(self, engine: str, version: int) -> None:
        self.versions[engine] = version
        self.took(self.router.saw_version(engine, version, self.now_s))

    @rule(session=st.sampled_from("abcdefgh"))
    def end(self, session: str) -> None:
        self.router.end_session(session)

    @rule(delta_s=st.floats(0.0, 5.0))
    def pass_time(self, delta_s: float) -> None:
        self.now_s += delta_s

    @invariant()
    def no_engine_has_more_than_its_limit(self) -> None:
        for engine in ENGINES:
            assert sum(e == engine for e in self.granted.values()) <= POLICY.max_in_flight
        for view in self.router.view():
            held = sum(e == view.name for e in self.granted.values())
            assert view.in_flight == held

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        waiting = self.demands.keys() - self.granted.keys()
        counted = sum(limiter.waiting for limiter in self.router.limiters(self.now_s))
        assert counted == len(waiting)
        full = {v.name for v in self.router.view() if v.in_flight == POLICY.max_in_flight}
        for ticket in waiting:
            fitting = {e for e in self.ins if self.demands[ticket].met_by(self.versions[e])}
            assert not fitting or fitting & full


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=40)
