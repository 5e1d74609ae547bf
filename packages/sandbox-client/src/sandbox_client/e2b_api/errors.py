"""E2B's errors: what the REST API and envd answer, and which of our errors become which.

The official SDK tells errors apart by HTTP status, by Connect code, and for a sandbox that is gone
by the words "was not found" in a 502.
"""

import math

from service_kit.errors import Reason, ServiceError

from sandbox_client.errors import SandboxGone

__all__ = ["ApiError", "EnvdError", "GoneError", "api_error", "envd_error", "gone"]

_HTTP_STATUS = {
    "canceled": 499,
    "unknown": 500,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "unauthenticated": 401,
}


class ApiError(Exception):
    """An error of the REST API, and of envd's plain HTTP calls.

    Args:
        status: HTTP status.
        message: For a human.
        retry_after_s: Sent as `Retry-After`, in whole seconds.
        error_code: For programs, where E2B has one.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        retry_after_s: float | None = None,
        error_code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s
        self.error_code = error_code

    @property
    def body(self) -> dict[str, object]:
        """As E2B writes it."""
        body: dict[str, object] = {"code": self.status, "message": self.message}
        return body | {"error_code": self.error_code} if self.error_code else body

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        if self.retry_after_s is None:
            return {}
        # The SDK reads whole seconds only.
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


class GoneError(ApiError):
    """The sandbox does not run (any more): what E2B's proxy answers in envd's place."""


class EnvdError(Exception):
    """An error of a Connect call: one of Connect's codes, and a message for a human."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def status(self) -> int:
        """HTTP status of a unary call that fails so."""
        return _HTTP_STATUS[self.code]

    @property
    def body(self) -> dict[str, str]:
        """As Connect writes it."""
        return {"code": self.code, "message": self.message}


def gone(sandbox_id: str) -> GoneError:
    """What a call to a sandbox that does not run is answered."""
    return GoneError(502, f"The sandbox {sandbox_id} was not found")


def api_error(error: ServiceError) -> ApiError:
    """One of our errors as the REST API tells it."""
    match error.reason:
        case Reason.SANDBOX_GONE | Reason.NOT_FOUND | Reason.ENVIRONMENT_UNKNOWN:
            return ApiError(404, error.message)
        case Reason.QUOTA_EXHAUSTED:
            return ApiError(429, error.message, retry_after_s=error.retry_after_s or 1.0)
        case Reason.ALREADY_EXISTS:
            return ApiError(409, error.message)
        case Reason.INVALID_ARGUMENT | Reason.PATCH_REJECTED:
            return ApiError(400, error.message)
        case Reason.TOO_LARGE:
            return ApiError(413, error.message)
        case Reason.UNIMPLEMENTED:
            return ApiError(501, error.message)
    if error.retryable:
        return ApiError(503, error.message, retry_after_s=error.retry_after_s)
    return ApiError(500, error.message)


def envd_error(error: ServiceError) -> EnvdError:
    """One of our errors as envd tells it over Connect."""
    if isinstance(error, SandboxGone):
        # The words by which the SDK knows that it need not ask again.
        return EnvdError("unavailable", f"The sandbox was not found: {error.message}")
    match error.reason:
        case Reason.INVALID_ARGUMENT | Reason.TOO_LARGE:
            return EnvdError("invalid_argument", error.message)
        case Reason.QUOTA_EXHAUSTED:
            return EnvdError("resource_exhausted", error.message)
        case Reason.UNIMPLEMENTED:
            return EnvdError("unimplemented", error.message)
    return EnvdError("unavailable" if error.retryable else "internal", error.message)
