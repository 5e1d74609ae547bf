import pytest
from sandbox_client import errors
from sandbox_client.errors import is_infrastructure, typed
from service_kit.errors import Reason, ServiceError, service_error


@pytest.mark.parametrize(
    ("reason", "kind", "infrastructure"),
    [
        (Reason.INVALID_ARGUMENT, errors.WrongRequest, False),
        (Reason.TOO_LARGE, errors.TooLarge, False),
        (Reason.PATCH_REJECTED, errors.PatchRejected, False),
        (Reason.ALREADY_EXISTS, errors.IdempotencyConflict, False),
        (Reason.ENVIRONMENT_UNKNOWN, errors.EnvironmentUnknown, True),
        (Reason.SANDBOX_GONE, errors.SandboxGone, True),
        (Reason.ISOLATION_UNAVAILABLE, errors.IsolationUnavailable, True),
        (Reason.QUOTA_EXHAUSTED, errors.QuotaExhausted, True),
        (Reason.UNAVAILABLE, errors.SandboxUnavailable, True),
        (Reason.DRAINING, errors.SandboxUnavailable, True),
        (Reason.INJECTED_FAULT, errors.InjectedFault, True),
        (Reason.DEADLINE_EXCEEDED, ServiceError, True),
        (Reason.INTERNAL, ServiceError, True),
    ],
)
def test_a_reason_has_its_class_and_its_fault(
    reason: Reason, kind: type[ServiceError], infrastructure: bool
) -> None:
    plain = service_error(reason, "text", retry_after_s=2.0, metadata={"a": "1"})
    error = typed(plain)
    assert isinstance(error, kind)
    assert is_infrastructure(error) is infrastructure
    assert (error.message, error.reason, error.retryable) == ("text", reason, plain.retryable)
    assert (error.retry_after_s, error.metadata, error.code) == (2.0, {"a": "1"}, plain.code)


def test_an_error_that_has_its_class_stays_the_same_object() -> None:
    error = errors.SandboxGone("gone")
    assert typed(error) is error
