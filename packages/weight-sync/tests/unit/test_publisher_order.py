import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from weight_sync.core.manifest import PolicyVersion, digest
from weight_sync.core.publisher import RunRecord, acquire, admit
from weight_sync.errors import AnchorRequired, Fenced, NumberNotRising


def version(number: int, incarnation: int) -> PolicyVersion:
    return PolicyVersion(
        run="run",
        incarnation=incarnation,
        number=number,
        step=0,
        parent=0,
        root_hash=digest(b""),
    )


class ManyPublishers(RuleBasedStateMachine):
    """Publishers that were replaced go on announcing; the service is asked in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.record = RunRecord("run")
        self.announced: list[PolicyVersion] = []

    @rule(known=st.integers(0, 60))
    def resume(self, known: int) -> None:
        before = self.record
        self.record = acquire(before, known_number=known)
        assert self.record.incarnation == before.incarnation + 1
        assert self.record.last_number >= max(known, before.last_number)

    @rule(
        number=st.integers(1, 80),
        behind=st.integers(0, 3),
        base=st.integers(0, 80),
    )
    def announce(self, number: int, behind: int, base: int) -> None:
        incarnation = self.record.incarnation - behind
        if incarnation < 1:
            return
        try:
            self.record = admit(self.record, version(number, incarnation), base=base)
        except (Fenced, NumberNotRising, AnchorRequired):
            return
        if self.announced:
            last = self.announced[-1]
            assert number > last.number
            assert incarnation >= last.incarnation
            if incarnation > last.incarnation:
                assert base == 0
        if base:
            assert any(v.number == base and v.incarnation == incarnation for v in self.announced)
        self.announced.append(version(number, incarnation))


ManyPublishers.TestCase.settings = settings(max_examples=100, deadline=None)
test_numbers_rise_and_lineages_begin_with_anchors = ManyPublishers.TestCase


def test_an_older_incarnation_is_fenced() -> None:
    record = acquire(acquire(RunRecord("run"), known_number=0), known_number=0)
    with pytest.raises(Fenced, match=r"incarnation 2 publishes, .* came from incarnation 1"):
        admit(record, version(1, 1), base=0)


def test_an_incarnation_that_nobody_was_given_is_refused() -> None:
    with pytest.raises(Fenced):
        admit(RunRecord("run"), version(1, 1), base=0)


def test_a_number_is_announced_once() -> None:
    record = admit(acquire(RunRecord("run"), known_number=4), version(5, 1), base=0)
    with pytest.raises(NumberNotRising, match="expected a number above 5, found 5"):
        admit(record, version(5, 1), base=0)


def test_a_resumed_run_must_begin_with_an_anchor() -> None:
    record = admit(acquire(RunRecord("run"), known_number=0), version(1, 1), base=0)
    record = admit(record, version(2, 1), base=1)
    resumed = acquire(record, known_number=0)
    with pytest.raises(AnchorRequired, match="delta of 2, which incarnation 2 has not announced"):
        admit(resumed, version(3, 2), base=2)
    resumed = admit(resumed, version(3, 2), base=0)
    admit(resumed, version(4, 2), base=3)
