"""Faults refill their own attempt up to a cap; nothing is retried for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_engine.core.group import GroupState, RefillPolicy, Slot, SlotStatus
from rollout_engine.types import Fault, FaultCause, FaultStage

FAULT = Fault(FaultStage.GRADE, FaultCause.GRADER, "no")
POLICY = RefillPolicy(per_attempt=2, per_group=100)


def test_a_fault_refills_that_attempt_alone() -> None:
    state = GroupState.new(3)
    for index in range(3):
        state = state.leased(index)
    state = state.faulted(1, FAULT, POLICY)
    assert state.pending == (1,)
    assert [slot.try_number for slot in state.slots] == [0, 1, 0]


def test_an_attempt_is_given_up_after_its_refills_and_the_group_is_quarantined() -> None:
    state = GroupState.new(2).leased(0).ended_validly(0)
    for _ in range(3):
        assert not state.finished
        state = state.leased(1).faulted(1, FAULT, POLICY)
    assert state.finished
    assert state.valid == 1
    assert state.quarantined == FAULT
    assert state.slots[1].try_number == 2


def test_a_group_whose_faults_reach_its_cap_gets_no_refill() -> None:
    policy = RefillPolicy(per_attempt=9, per_group=1)
    state = GroupState.new(2).leased(0).leased(1)
    state = state.faulted(0, FAULT, policy)
    assert state.pending == (0,)
    state = state.faulted(1, FAULT, policy)
    assert state.slots[1].status is SlotStatus.GIVEN_UP


def test_a_recovered_group_goes_on_where_its_ledger_left_it() -> None:
    slots = {
        0: Slot(SlotStatus.VALID),
        1: Slot(SlotStatus.PENDING, try_number=2, faults=1, last_fault=FAULT),
    }
    state = GroupState.recovered(slots, attempts=3)
    assert state.pending == (1, 2)
    assert [slot.try_number for slot in state.slots] == [0, 2, 0]
    assert (state.valid, state.faults) == (1, 1)


def test_an_attempt_that_does_not_run_cannot_end() -> None:
    with pytest.raises(ValueError, match="PENDING; expected RUNNING"):
        GroupState.new(1).ended_validly(0)


@given(
    st.integers(1, 8),
    st.builds(RefillPolicy, st.integers(0, 3), st.integers(0, 12)),
    st.data(),
)
def test_every_group_finishes_and_tries_never_repeat(
    attempts: int, policy: RefillPolicy, data: st.DataObject
) -> None:
    state = GroupState.new(attempts)
    made: set[tuple[int, int]] = set()
    ends = 0
    while not state.finished:
        running = [i for i, s in enumerate(state.slots) if s.status is SlotStatus.RUNNING]
        index = data.draw(st.sampled_from(sorted((*state.pending, *running))))
        if index in state.pending:
            state = state.leased(index)
            key = (index, state.slots[index].try_number)
            assert key not in made
            made.add(key)
            continue
        ends += 1
        if data.draw(st.booleans()):
            state = state.faulted(index, FAULT, policy)
        else:
            state = state.ended_validly(index)
    assert ends == len(made)
    assert len(made) <= attempts * (policy.per_attempt + 1)
    assert len(made) <= attempts + policy.per_group
    given_up = sum(slot.status is SlotStatus.GIVEN_UP for slot in state.slots)
    assert state.valid + given_up == attempts
    assert (state.quarantined is not None) == (given_up > 0)
