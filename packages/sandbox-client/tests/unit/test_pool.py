"""What the warm pool keeps, makes and ends."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sandbox_client.core.pool import PoolBounds, PoolPlan, WarmPool

BOUNDS = PoolBounds(sandboxes=4, memory_bytes=1000, idle_bytes=100, per_kind=2, demand_s=60.0)
NOTHING = PoolPlan(None, ())


def filled(pool: WarmPool, now: float) -> list[str]:
    """Makes what the pool wants until it wants no more; the kinds in their order."""
    made: list[str] = []
    while (kind := pool.plan(now).make) is not None:
        pool.started(kind)
        pool.made(kind, f"{kind}-{len(made)}-{now}")
        made.append(kind)
    return made


def test_nothing_is_made_for_what_nobody_asked_for() -> None:
    assert WarmPool(BOUNDS).plan(0) == NOTHING


def test_a_kind_that_was_asked_for_is_kept_and_handed_out_once_each() -> None:
    pool = WarmPool(BOUNDS)
    assert pool.ask("a", 0) is None
    assert filled(pool, 0) == ["a", "a"]
    first, second = pool.ask("a", 1), pool.ask("a", 1)
    assert {first, second} == {"a-0-0", "a-1-0"}
    assert pool.ask("a", 1) is None
    assert pool.ask("b", 1) is None


def test_what_is_being_made_is_not_made_twice() -> None:
    pool = WarmPool(BOUNDS)
    pool.ask("a", 0)
    for _ in range(2):
        assert pool.plan(0).make == "a"
        pool.started("a")
    assert pool.plan(0).make is None


def test_the_kinds_asked_for_last_have_the_room() -> None:
    pool = WarmPool(BOUNDS)
    for kind in "abc":
        pool.ask(kind, 0)
    assert filled(pool, 0) == ["c", "c", "b", "b"]
    pool.ask("a", 1)
    plan = pool.plan(1)
    # b was asked for longest ago; there is room only once its sandboxes are gone.
    assert {sandbox.partition("-")[0] for sandbox in plan.end} == {"b"}
    assert plan.make is None
    for sandbox in plan.end:
        pool.remove(sandbox)
    assert filled(pool, 1) == ["a", "a"]


def test_demand_ends() -> None:
    pool = WarmPool(BOUNDS)
    pool.ask("a", 0)
    filled(pool, 0)
    assert pool.plan(60) == NOTHING
    assert len(pool.plan(60.1).end) == 2
    assert not pool.is_asked("a")


def test_a_kind_that_cannot_be_made_waits_until_it_is_asked_for_again() -> None:
    pool = WarmPool(BOUNDS)
    pool.ask("a", 0)
    pool.started("a")
    pool.failed("a")
    assert pool.plan(0) == NOTHING
    pool.ask("a", 1)
    assert pool.plan(1).make == "a"


def test_memory_bounds_the_count() -> None:
    assert PoolBounds(10, 350, 100, 2, 60.0).total == 3
    assert PoolBounds(2, 350, 100, 2, 60.0).total == 2
    assert PoolBounds(0, 350, 100, 2, 60.0).total == 0


class PoolMachine(RuleBasedStateMachine):
    """Any order of asking, making, losing and time: the bounds hold and nothing is given twice."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = WarmPool(BOUNDS)
        self.now = 0.0
        self.making: list[str] = []
        self.idle: dict[str, str] = {}
        self.serial = 0

    @rule(kind=st.sampled_from("abcde"))
    def ask(self, kind: str) -> None:
        found = self.pool.ask(kind, self.now)
        if found is None:
            assert kind not in self.idle.values()
        else:
            assert self.idle.pop(found) == kind

    @rule()
    def follow_plan(self) -> None:
        plan = self.pool.plan(self.now)
        for sandbox in plan.end:
            del self.idle[sandbox]
            self.pool.remove(sandbox)
        if plan.make is not None:
            self.pool.started(plan.make)
            self.making.append(plan.make)

    @precondition(lambda self: self.making)
    @rule(works=st.booleans())
    def finish(self, works: bool) -> None:
        kind = self.making.pop()
        if works:
            self.serial += 1
            self.idle[f"s{self.serial}"] = kind
            self.pool.made(kind, f"s{self.serial}")
        else:
            self.pool.failed(kind)

    @precondition(lambda self: self.idle)
    @rule()
    def lose(self) -> None:
        sandbox = next(iter(self.idle))
        del self.idle[sandbox]
        self.pool.remove(sandbox)

    @rule(passed=st.floats(0, 100))
    def wait(self, passed: float) -> None:
        self.now += passed

    @invariant()
    def bounds_hold(self) -> None:
        assert len(self.pool) == len(self.idle) + len(self.making) <= BOUNDS.total

    @invariant()
    def it_settles(self) -> None:
        plan = self.pool.plan(self.now)
        assert set(plan.end) <= self.idle.keys()
        assert plan.make is None or self.pool.is_asked(plan.make)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60)
