"""Every error becomes a fault with stage and cause; none becomes a grade."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_engine.core.outcome import fault_of
from rollout_engine.types import FaultCause, FaultStage
from service_kit.errors import Reason, service_error


@pytest.mark.parametrize(
    ("error", "stage", "cause"),
    [
        (service_error(Reason.INJECTED_FAULT, "x"), FaultStage.COMMAND, FaultCause.INJECTED),
        (service_error(Reason.SANDBOX_GONE, "x"), FaultStage.COMMAND, FaultCause.SANDBOX),
        (service_error(Reason.UNAVAILABLE, "x"), FaultStage.GRADE, FaultCause.NETWORK),
        (service_error(Reason.UNAVAILABLE, "x"), FaultStage.GENERATE, FaultCause.ENGINE),
        (service_error(Reason.DEADLINE_EXCEEDED, "x"), FaultStage.GENERATE, FaultCause.DEADLINE),
        (service_error(Reason.QUOTA_EXHAUSTED, "x"), FaultStage.SANDBOX_START, FaultCause.QUOTA),
        (service_error(Reason.DISK_FULL, "x"), FaultStage.DIFF, FaultCause.DISK),
        (service_error(Reason.ENVIRONMENT_UNKNOWN, "x"), FaultStage.TASK, FaultCause.IMAGE),
        (service_error(Reason.NOT_FOUND, "x"), FaultStage.TASK, FaultCause.TASK),
        (service_error(Reason.INVALID_ARGUMENT, "x"), FaultStage.TASK, FaultCause.TASK),
        (service_error(Reason.INTERNAL, "x"), FaultStage.GRADE, FaultCause.GRADER),
        (service_error(Reason.INTERNAL, "x"), FaultStage.GENERATE, FaultCause.ENGINE),
        (service_error(Reason.INVALID_ARGUMENT, "x"), FaultStage.COMMAND, FaultCause.BUG),
        (service_error(Reason.ENGINE_POISONED, "x"), FaultStage.GENERATE, FaultCause.ENGINE),
        (TimeoutError(), FaultStage.GENERATE, FaultCause.DEADLINE),
        (OSError(errno.ENOSPC, "full"), FaultStage.LEDGER, FaultCause.DISK),
        (ConnectionResetError(), FaultStage.GENERATE, FaultCause.NETWORK),
        (ValueError("ours"), FaultStage.INTERNAL, FaultCause.BUG),
    ],
)
def test_errors_by_stage_and_cause(error: Exception, stage: FaultStage, cause: FaultCause) -> None:
    fault = fault_of(error, stage)
    assert (fault.stage, fault.cause) == (stage, cause)


def test_a_cause_told_by_the_grader_is_believed() -> None:
    error = service_error(Reason.INTERNAL, "x", metadata={"fault_cause": "IMAGE"})
    assert fault_of(error, FaultStage.GRADE).cause is FaultCause.IMAGE


def test_the_first_of_a_group_of_errors_counts_and_long_texts_are_cut() -> None:
    group = ExceptionGroup("several", [TimeoutError("x" * 9999), ValueError()])
    fault = fault_of(group, FaultStage.GRADE)
    assert fault.cause is FaultCause.DEADLINE
    assert fault.message.startswith("TimeoutError: x")
    assert len(fault.message) == 500


@given(st.sampled_from(Reason), st.sampled_from(FaultStage), st.booleans())
def test_no_reason_at_any_stage_is_left_without_a_cause(
    reason: Reason, stage: FaultStage, retryable: bool
) -> None:
    fault = fault_of(service_error(reason, "x", retryable=retryable), stage)
    assert fault.stage is stage
    assert fault.cause in FaultCause
