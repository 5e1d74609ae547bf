"""The invariant: an engine that reports v holds exactly the bytes of v, or reports nothing."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from weight_sync.core.manifest import PolicyVersion, digest
from weight_sync.core.receiver import (
    Activate,
    Activated,
    ActivateFailed,
    Attempts,
    EngineState,
    Event,
    Lost,
    Phase,
    Prepare,
    Prepared,
    PrepareFailed,
    Verified,
    doubt,
    supersedes,
    transition,
    wants,
)
from weight_sync.errors import IllegalTransition


def version(number: int) -> PolicyVersion:
    return PolicyVersion(
        run="run",
        incarnation=1,
        number=number,
        step=number,
        parent=number - 1,
        root_hash=digest(str(number).encode()),
    )


LOADS = {
    # outcome: (content after, label after, does the engine answer)
    "done": ("new", "new", True),
    "refused": ("old", "old", False),
    "torn": ("torn", "old", False),
    "torn under the new label": ("torn", "new", True),
    "stale under the new label": ("old", "new", True),
    "new under the old label": ("new", "old", True),
    "done, answer lost": ("new", "new", False),
    "killed": ("base", "default", False),
}


@dataclass
class Engine:
    content: str = "base"
    label: str = "default"
    paused: bool = False
    life: int = 0

    def restart(self) -> None:
        self.content, self.label, self.paused = "base", "default", False
        self.life += 1


class OneEngine(RuleBasedStateMachine):
    """A receiver and an engine that lies, tears, dies and restarts at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine()
        self.state = EngineState()
        self.published = [version(1)]
        self.claimed_life = 0

    def apply(self, event: Event) -> None:
        had = self.state.held
        self.state = transition(self.state, event)
        if self.state.held is not None and had is None:
            self.claimed_life = self.engine.life

    def content_is(self, claim: PolicyVersion) -> bool:
        return self.engine.content == claim.root_hash

    @rule()
    def publish(self) -> None:
        self.published.append(version(len(self.published) + 1))

    @precondition(lambda self: wants(self.state, self.published[-1]))
    @rule()
    def prepare(self) -> None:
        target = self.published[-1]
        if self.state.target != target:
            self.apply(Prepare(target))

    @precondition(lambda self: self.state.phase is Phase.PREPARING)
    @rule(fails=st.booleans())
    def end_of_prepare(self, fails: bool) -> None:
        self.apply(PrepareFailed("bit flip") if fails else Prepared())

    @precondition(lambda self: self.state.phase is Phase.READY)
    @rule()
    def begin_activation(self) -> None:
        self.apply(Activate())
        self.engine.paused = True

    @precondition(lambda self: self.state.phase is Phase.ACTIVATING)
    @rule(outcome=st.sampled_from(sorted(LOADS)))
    def end_activation(self, outcome: str) -> None:
        target = self.state.target
        assert target is not None
        content, label, answers = LOADS[outcome]
        if content == "base":
            self.engine.restart()
        else:
            names = {"new": target.root_hash, "old": self.engine.content, "torn": "torn"}
            self.engine.content = names[content]
            self.engine.label = target.label if label == "new" else self.engine.label
        if answers and self.engine.label == target.label and self.content_is(target):
            self.engine.paused = False
            self.apply(Activated())
        else:
            self.apply(ActivateFailed(outcome))

    @rule()
    def engine_restarts(self) -> None:
        self.engine.restart()
        if self.state.phase is Phase.ACTIVATING:
            self.apply(ActivateFailed("connection lost"))

    @rule(answers=st.booleans())
    def poll(self, answers: bool) -> None:
        event = doubt(self.state, self.engine.label if answers else None)
        if event is not None:
            self.apply(event)

    @rule()
    def receiver_restarts(self) -> None:
        self.state = EngineState()

    @precondition(lambda self: self.state.phase is Phase.UNKNOWN)
    @rule()
    def verify(self) -> None:
        for candidate in self.published:
            if self.engine.label == candidate.label and self.content_is(candidate):
                self.engine.paused = False
                self.apply(Verified(candidate))
                return

    @invariant()
    def what_the_receiver_reports_is_held(self) -> None:
        # A restart that nobody has polled yet is the one thing a receiver cannot know.
        if self.state.held is not None and self.claimed_life == self.engine.life:
            assert self.content_is(self.state.held)

    @invariant()
    def what_a_generating_engine_reports_is_held(self) -> None:
        if not self.engine.paused and self.engine.label != "default":
            number = int(self.engine.label)
            assert self.content_is(self.published[number - 1])

    @invariant()
    def never_claims_while_the_weights_change(self) -> None:
        if self.state.phase in (Phase.ACTIVATING, Phase.POISONED, Phase.UNKNOWN):
            assert self.state.held is None


OneEngine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_one_engine_under_any_schedule = OneEngine.TestCase


def after(state: EngineState, *events: Event) -> EngineState:
    for event in events:
        state = transition(state, event)
    return state


SERVING = EngineState(Phase.SERVING, held=version(1))


def test_a_clean_update_ends_serving_the_target() -> None:
    state = SERVING
    steps: list[tuple[Event, Phase]] = [
        (Prepare(version(2)), Phase.PREPARING),
        (Prepared(), Phase.READY),
        (Activate(), Phase.ACTIVATING),
        (Activated(), Phase.SERVING),
    ]
    for event, phase in steps:
        state = transition(state, event)
        assert state.phase is phase
    assert state.held == version(2)
    assert state.target is None


def test_a_failed_preparation_leaves_a_serving_engine_serving() -> None:
    state = transition(SERVING, Prepare(version(2)))
    state = transition(state, PrepareFailed("disk full"))
    assert state == EngineState(Phase.SERVING, held=version(1), error="disk full")


def test_a_failed_activation_stays_poisoned_until_a_load_succeeds() -> None:
    state = after(SERVING, Prepare(version(2)), Prepared(), Activate(), ActivateFailed("torn"))
    assert state.phase is Phase.POISONED
    assert state.error == "torn"
    with pytest.raises(IllegalTransition):
        transition(state, Verified(version(1)))
    state = transition(state, Prepare(version(3)))
    state = transition(state, PrepareFailed("no payload"))
    assert state.phase is Phase.POISONED
    state = after(state, Prepare(version(3)), Prepared(), Activate(), Activated())
    assert state == EngineState(Phase.SERVING, held=version(3))


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (EngineState(), Activate()),
        (EngineState(), Activated()),
        (SERVING, Activate()),
        (SERVING, Prepared()),
        (SERVING, Verified(version(2))),
        (EngineState(Phase.ACTIVATING, target=version(2)), Prepare(version(3))),
        (EngineState(Phase.ACTIVATING, target=version(2)), Lost("gone")),
    ],
)
def test_a_move_that_is_not_in_the_table_is_refused(state: EngineState, event: Event) -> None:
    with pytest.raises(IllegalTransition):
        transition(state, event)


@pytest.mark.parametrize(
    "parts",
    [
        {"phase": Phase.SERVING},
        {"phase": Phase.ACTIVATING, "held": version(1), "target": version(2)},
        {"phase": Phase.POISONED, "held": version(1)},
        {"phase": Phase.PREPARING},
        {"phase": Phase.SERVING, "held": version(1), "poisoned": True},
    ],
)
def test_a_state_that_breaks_the_invariant_cannot_be_built(parts: dict[str, object]) -> None:
    with pytest.raises(IllegalTransition):
        EngineState(**parts)  # type: ignore[arg-type]


def test_only_the_newest_version_is_wanted() -> None:
    assert not wants(EngineState(), None)
    assert wants(EngineState(), version(1))
    assert wants(SERVING, version(2))
    assert not wants(SERVING, version(1))
    assert not wants(EngineState(Phase.ACTIVATING, target=version(2)), version(3))


def test_failures_in_a_row_are_stuck_and_any_success_ends_it() -> None:
    attempts = Attempts(stuck_after=2)
    attempts.failed(4)
    attempts.succeeded()
    attempts.failed(5)
    assert attempts.stuck_at == 0
    attempts.failed(6)
    assert attempts.stuck_at == 6
    attempts.failed(7)
    assert attempts.stuck_at == 7
    attempts.succeeded()
    assert attempts.stuck_at == 0


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=20),
)
def test_whatever_order_announcements_come_in_the_newest_number_stays(
    told: list[tuple[int, int]],
) -> None:
    """Also when an older incarnation is heard again after a newer one, or a stream starts anew."""
    newest: PolicyVersion | None = None
    for number, incarnation in told:
        offered = replace(version(number), incarnation=incarnation)
        if supersedes(offered, newest):
            newest = offered
    assert newest is not None
    assert newest.number == max(number for number, _ in told)


def test_another_run_replaces_this_one_whatever_its_numbers() -> None:
    assert supersedes(replace(version(1), run="another"), version(9))
    assert not supersedes(version(9), version(9))
