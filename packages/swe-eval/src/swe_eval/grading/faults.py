"""From errors on the way to a verdict to a cause, and faults on purpose."""

import hashlib
from enum import Enum

from service_kit.errors import DOMAIN, Reason, ServiceError, service_error

FAULT_CAUSE_KEY = "fault_cause"
"""Key of `ErrorInfo.metadata`: the name of a `tailrace.common.v1.FaultCause`."""

STAGE_KEY = "grading_stage"
"""Key of `ErrorInfo.metadata`: the name of a `Stage`, for the steps that have one."""

GRADE_REASON_KEY = "grade_reason"
"""Key of `ErrorInfo.metadata`: why a task's own reference solution does not pass it."""


class Stage(Enum):
    """A step of grading that uses a sandbox, in words."""

    START_SANDBOX = "starting a sandbox"
    APPLY_DIFF = "applying the diff"
    RUN_TESTS = "running the tests"
    RUN_CONTROL = "running altered tests"
    RUN_REFERENCE = "running the reference solution"


_CAUSES = {
    Reason.DEADLINE_EXCEEDED: "DEADLINE",
    Reason.QUOTA_EXHAUSTED: "QUOTA",
    Reason.DISK_FULL: "DISK",
    Reason.ENVIRONMENT_UNKNOWN: "IMAGE",
    Reason.INJECTED_FAULT: "INJECTED",
    Reason.CHECKSUM_MISMATCH: "NETWORK",
    Reason.UNAUTHENTICATED: "NETWORK",
    Reason.INTERNAL: "BUG",
    Reason.INVALID_ARGUMENT: "BUG",
}


def with_cause(error: ServiceError, *, stage: Stage) -> ServiceError:
    """The error of a grading step: what was done, and the cause for whoever records the fault."""
    cause = error.metadata.get(FAULT_CAUSE_KEY) or _cause_of(error)
    return service_error(
        error.reason,
        f"grading failed while {stage.value}: {error.message}",
        retryable=error.retryable,
        retry_after_s=error.retry_after_s,
        metadata={**error.metadata, FAULT_CAUSE_KEY: cause, STAGE_KEY: stage.name},
    )


def _cause_of(error: ServiceError) -> str:
    if error.reason is Reason.UNAVAILABLE and error.domain != DOMAIN:
        return "NETWORK"  # said by this end of the channel: nobody answered
    return _CAUSES.get(error.reason, "SANDBOX")


def is_chosen(key: str, *, rate: float, seed: int) -> bool:
    """Whether a fault is injected into the attempt with this key; the same answer every time."""
    digest = hashlib.sha256(f"{seed}\0{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < rate * 2**64
