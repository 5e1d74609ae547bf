"""From an error to a fault: where it struck and what failed. Nothing here becomes a grade.

Every error that ends an attempt passes through `fault_of`. It has no way to make anything but a
`Fault`, so a failure of infrastructure cannot turn into a reward of zero.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping

from service_kit.errors import Reason, ServiceError, leaf_errors

from rollout_engine.types import Fault, FaultCause, FaultStage

MAX_MESSAGE_CHARACTERS = 500

_BY_REASON: Mapping[Reason, FaultCause] = {
    Reason.INJECTED_FAULT: FaultCause.INJECTED,
    Reason.DEADLINE_EXCEEDED: FaultCause.DEADLINE,
    Reason.QUOTA_EXHAUSTED: FaultCause.QUOTA,
    Reason.DISK_FULL: FaultCause.DISK,
    Reason.UNAVAILABLE: FaultCause.NETWORK,
    Reason.DRAINING: FaultCause.NETWORK,
    Reason.UNAUTHENTICATED: FaultCause.NETWORK,
    Reason.CANCELLED: FaultCause.NETWORK,
    Reason.ENVIRONMENT_UNKNOWN: FaultCause.IMAGE,
    Reason.CHECKSUM_MISMATCH: FaultCause.NETWORK,
    Reason.SANDBOX_GONE: FaultCause.SANDBOX,
    Reason.LEASE_EXPIRED: FaultCause.SANDBOX,
    Reason.ISOLATION_UNAVAILABLE: FaultCause.SANDBOX,
    Reason.VERSION_NOT_READY: FaultCause.ENGINE,
    Reason.ENGINE_POISONED: FaultCause.ENGINE,
}
_BY_STAGE: Mapping[FaultStage, FaultCause] = {
    FaultStage.TASK: FaultCause.TASK,
    FaultStage.SANDBOX_START: FaultCause.SANDBOX,
    FaultStage.GENERATE: FaultCause.ENGINE,
    FaultStage.COMMAND: FaultCause.SANDBOX,
    FaultStage.DIFF: FaultCause.SANDBOX,
    FaultStage.GRADE: FaultCause.GRADER,
}
# Reasons with which a peer says that our request is wrong.
_OUR_FAULT = frozenset(
    {
        Reason.INVALID_ARGUMENT,
        Reason.FAILED_PRECONDITION,
        Reason.ALREADY_EXISTS,
        Reason.UNIMPLEMENTED,
        Reason.DEADLINE_REQUIRED,
        Reason.TOO_LARGE,
    }
)


def fault_of(error: BaseException, stage: FaultStage) -> Fault:
    """Say what an error means as a fault.

    Args:
        error: What ended the attempt; of a group of errors the first counts.
        stage: Where the attempt was.

    """
    leaf = next(leaf_errors(error))
    message = f"{type(leaf).__name__}: {leaf}"
    return Fault(stage, _cause(leaf, stage), message[:MAX_MESSAGE_CHARACTERS])


def _cause(error: BaseException, stage: FaultStage) -> FaultCause:
    if isinstance(error, ServiceError):
        return _cause_of_service_error(error, stage)
    if isinstance(error, TimeoutError):
        return FaultCause.DEADLINE
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return FaultCause.DISK
        if isinstance(error, ConnectionError):
            return FaultCause.NETWORK
    return FaultCause.BUG


def _cause_of_service_error(error: ServiceError, stage: FaultStage) -> FaultCause:
    # A service that knows better than its reason says so, as the grader does.
    told = FaultCause.__members__.get(error.metadata.get("fault_cause", ""))
    if told is not None:
        return told
    if stage is FaultStage.GENERATE and error.reason is Reason.UNAVAILABLE:
        return FaultCause.ENGINE
    by_reason = _BY_REASON.get(error.reason)
    if by_reason is not None:
        return by_reason
    if stage is FaultStage.TASK:
        return FaultCause.TASK
    if error.reason in _OUR_FAULT:
        return FaultCause.BUG
    return _BY_STAGE.get(stage, FaultCause.BUG)


__all__ = ["fault_of"]
