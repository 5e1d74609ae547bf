"""Why a call about sandboxes was refused or failed.

All are `service_kit.ServiceError`s: the service raises them, and the client raises the same class
again. `reason` and `retryable` say what a caller can do; the classes here are those that callers
tell apart. `is_infrastructure` separates a machine's failure from a wrong request.
"""

from service_kit.errors import (
    Aborted,
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Reason,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)

__all__ = [
    "EnvironmentUnknown",
    "IdempotencyConflict",
    "InjectedFault",
    "IsolationUnavailable",
    "PatchRejected",
    "QuotaExhausted",
    "SandboxGone",
    "SandboxUnavailable",
    "ServiceError",
    "TooLarge",
    "WrongRequest",
    "is_infrastructure",
    "typed",
]


class WrongRequest(InvalidArgument):
    """The request itself is wrong (a path that leaves the root, an unknown back-end's source)."""


class TooLarge(InvalidArgument):
    """A file, diff or message is over its documented limit. Retrying cannot help."""

    default_reason = Reason.TOO_LARGE


class EnvironmentUnknown(FailedPrecondition):
    """The host does not hold the environment. Put it, then create again."""

    default_reason = Reason.ENVIRONMENT_UNKNOWN


class SandboxGone(NotFound):
    """The sandbox was destroyed, reaped or lost. Only a new one helps.

    `metadata["cause"]` is "memory_limit" if its commands had used up its memory just before.
    """

    default_reason = Reason.SANDBOX_GONE


class IsolationUnavailable(FailedPrecondition):
    """This host cannot isolate a sandbox; the message says what is missing."""

    default_reason = Reason.ISOLATION_UNAVAILABLE


class PatchRejected(FailedPrecondition):
    """A patch does not apply. Nothing was changed."""

    default_reason = Reason.PATCH_REJECTED


class QuotaExhausted(ResourceExhausted):
    """A limit of the service is used up; `retry_after_s` says when to come back."""

    default_reason = Reason.QUOTA_EXHAUSTED


class IdempotencyConflict(AlreadyExists):
    """The idempotency key was used for a different request."""


class SandboxUnavailable(Unavailable):
    """The service cannot make or reach sandboxes at the moment; a later try can help."""


class InjectedFault(Aborted):
    """A fault that a test configuration asked for."""

    default_reason = Reason.INJECTED_FAULT


_BY_REASON: dict[Reason, type[ServiceError]] = {
    Reason.INVALID_ARGUMENT: WrongRequest,
    Reason.TOO_LARGE: TooLarge,
    Reason.ENVIRONMENT_UNKNOWN: EnvironmentUnknown,
    Reason.SANDBOX_GONE: SandboxGone,
    Reason.ISOLATION_UNAVAILABLE: IsolationUnavailable,
    Reason.PATCH_REJECTED: PatchRejected,
    Reason.QUOTA_EXHAUSTED: QuotaExhausted,
    Reason.ALREADY_EXISTS: IdempotencyConflict,
    Reason.UNAVAILABLE: SandboxUnavailable,
    Reason.DRAINING: SandboxUnavailable,
    Reason.INJECTED_FAULT: InjectedFault,
}

# What the caller or the command did, as opposed to what a machine did.
_NOT_INFRASTRUCTURE = frozenset(
    {
        Reason.INVALID_ARGUMENT,
        Reason.TOO_LARGE,
        Reason.PATCH_REJECTED,
        Reason.ALREADY_EXISTS,
        Reason.CANCELLED,
    }
)


def typed(error: ServiceError) -> ServiceError:
    """The error as the class of this package that belongs to its reason."""
    kind = _BY_REASON.get(error.reason)
    if kind is None or isinstance(error, kind):
        return error
    made = kind(
        error.message,
        reason=error.reason,
        retryable=error.retryable,
        retry_after_s=error.retry_after_s,
        metadata=error.metadata,
        domain=error.domain,
    )
    made.code = error.code
    return made


def is_infrastructure(error: ServiceError) -> bool:
    """Whether a machine failed, so that nobody's work may be judged by it."""
    return error.reason not in _NOT_INFRASTRUCTURE
