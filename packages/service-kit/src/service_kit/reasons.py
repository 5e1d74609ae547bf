"""The closed set of reasons for errors, and what each of them implies."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

import grpc


class Reason(enum.StrEnum):
    """Why a call was refused or failed: `tailrace.common.v1.ErrorReason` without its prefix."""

    UNSPECIFIED = "UNSPECIFIED"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    DEADLINE_REQUIRED = "DEADLINE_REQUIRED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    UNAVAILABLE = "UNAVAILABLE"
    DRAINING = "DRAINING"
    QUOTA_EXHAUSTED = "QUOTA_EXHAUSTED"
    TOO_LARGE = "TOO_LARGE"
    INTERNAL = "INTERNAL"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    CHECKSUM_MISMATCH = "CHECKSUM_MISMATCH"
    DISK_FULL = "DISK_FULL"
    ENVIRONMENT_UNKNOWN = "ENVIRONMENT_UNKNOWN"
    SANDBOX_GONE = "SANDBOX_GONE"
    ISOLATION_UNAVAILABLE = "ISOLATION_UNAVAILABLE"
    PATCH_REJECTED = "PATCH_REJECTED"
    INJECTED_FAULT = "INJECTED_FAULT"
    VERSION_NOT_READY = "VERSION_NOT_READY"
    STALE_BASE_VERSION = "STALE_BASE_VERSION"
    FENCED = "FENCED"
    ENGINE_POISONED = "ENGINE_POISONED"
    STALE_EPOCH = "STALE_EPOCH"
    CURSOR_EXPIRED = "CURSOR_EXPIRED"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    CHECKPOINT_INVALID = "CHECKPOINT_INVALID"


class ReasonTraits(NamedTuple):
    """What a reason implies unless the error says otherwise."""

    code: grpc.StatusCode
    retryable: bool


_C = grpc.StatusCode
REASON_TRAITS: Mapping[Reason, ReasonTraits] = {
    Reason.UNSPECIFIED: ReasonTraits(_C.UNKNOWN, retryable=False),
    Reason.INVALID_ARGUMENT: ReasonTraits(_C.INVALID_ARGUMENT, retryable=False),
    Reason.NOT_FOUND: ReasonTraits(_C.NOT_FOUND, retryable=False),
    Reason.ALREADY_EXISTS: ReasonTraits(_C.ALREADY_EXISTS, retryable=False),
    Reason.FAILED_PRECONDITION: ReasonTraits(_C.FAILED_PRECONDITION, retryable=False),
    Reason.UNAUTHENTICATED: ReasonTraits(_C.UNAUTHENTICATED, retryable=False),
    Reason.DEADLINE_REQUIRED: ReasonTraits(_C.INVALID_ARGUMENT, retryable=False),
    Reason.DEADLINE_EXCEEDED: ReasonTraits(_C.DEADLINE_EXCEEDED, retryable=True),
    Reason.CANCELLED: ReasonTraits(_C.CANCELLED, retryable=False),
    Reason.UNAVAILABLE: ReasonTraits(_C.UNAVAILABLE, retryable=True),
    Reason.DRAINING: ReasonTraits(_C.UNAVAILABLE, retryable=True),
    Reason.QUOTA_EXHAUSTED: ReasonTraits(_C.RESOURCE_EXHAUSTED, retryable=True),
    Reason.TOO_LARGE: ReasonTraits(_C.INVALID_ARGUMENT, retryable=False),
    Reason.INTERNAL: ReasonTraits(_C.INTERNAL, retryable=False),
    Reason.UNIMPLEMENTED: ReasonTraits(_C.UNIMPLEMENTED, retryable=False),
    Reason.CHECKSUM_MISMATCH: ReasonTraits(_C.DATA_LOSS, retryable=True),
    Reason.DISK_FULL: ReasonTraits(_C.RESOURCE_EXHAUSTED, retryable=False),
    Reason.ENVIRONMENT_UNKNOWN: ReasonTraits(_C.FAILED_PRECONDITION, retryable=False),
    Reason.SANDBOX_GONE: ReasonTraits(_C.NOT_FOUND, retryable=False),
    Reason.ISOLATION_UNAVAILABLE: ReasonTraits(_C.FAILED_PRECONDITION, retryable=False),
    Reason.PATCH_REJECTED: ReasonTraits(_C.FAILED_PRECONDITION, retryable=False),
    # ABORTED and not UNAVAILABLE: a channel's own retries must not hide an injected fault.
    Reason.INJECTED_FAULT: ReasonTraits(_C.ABORTED, retryable=True),
    Reason.VERSION_NOT_READY: ReasonTraits(_C.FAILED_PRECONDITION, retryable=True),
    Reason.STALE_BASE_VERSION: ReasonTraits(_C.FAILED_PRECONDITION, retryable=False),
    Reason.FENCED: ReasonTraits(_C.FAILED_PRECONDITION, retryable=False),
    Reason.ENGINE_POISONED: ReasonTraits(_C.FAILED_PRECONDITION, retryable=False),
    Reason.STALE_EPOCH: ReasonTraits(_C.FAILED_PRECONDITION, retryable=False),
    Reason.CURSOR_EXPIRED: ReasonTraits(_C.OUT_OF_RANGE, retryable=False),
    Reason.LEASE_EXPIRED: ReasonTraits(_C.FAILED_PRECONDITION, retryable=False),
    Reason.CHECKPOINT_INVALID: ReasonTraits(_C.FAILED_PRECONDITION, retryable=False),
}
"""Status code and retryability of each reason."""
