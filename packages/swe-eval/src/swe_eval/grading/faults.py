"""From errors on the way to a verdict to a cause, and faults on purpose."""

import hashlib

from service_kit.errors import Reason, ServiceError, service_error

FAULT_CAUSE_KEY = "fault_cause"
"""Key of `ErrorInfo.metadata`: the name of a `tailrace.common.v1.FaultCause`."""

_CAUSES = {
    Reason.DEADLINE_EXCEEDED: "DEADLINE",
    Reason.QUOTA_EXHAUSTED: "QUOTA",
    Reason.DISK_FULL: "DISK",
    Reason.INJECTED_FAULT: "INJECTED",
    Reason.UNAUTHENTICATED: "NETWORK",
    Reason.INTERNAL: "BUG",
    Reason.INVALID_ARGUMENT: "BUG",
}


def with_cause(error: ServiceError, *, doing: str) -> ServiceError:
    """The error of a grading step: what was done, and the cause for whoever records the fault."""
    cause = error.metadata.get(FAULT_CAUSE_KEY) or _CAUSES.get(error.reason, "SANDBOX")
    return service_error(
        error.reason,
        f"grading failed while {doing}: {error.message}",
        retryable=error.retryable,
        retry_after_s=error.retry_after_s,
        metadata={**error.metadata, FAULT_CAUSE_KEY: cause},
    )


def is_chosen(key: str, *, rate: float, seed: int) -> bool:
    """Whether a fault is injected into the attempt with this key; the same answer every time."""
    digest = hashlib.sha256(f"{seed}\0{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < rate * 2**64
