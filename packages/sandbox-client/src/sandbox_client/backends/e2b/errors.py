"""What the SDK raises, as errors of this package.

Quota, gone, infrastructure and wrong requests are told apart.
"""

import contextlib
from collections.abc import Iterator

import httpx
from e2b import CommandExitException
from e2b.exceptions import (
    AuthenticationException,
    BuildException,
    FileNotFoundException,
    InvalidArgumentException,
    NotEnoughSpaceException,
    RateLimitException,
    SandboxException,
    SandboxNotFoundException,
    SandboxNotRunningException,
    ServiceBusyException,
    TemplateException,
)

from sandbox_client.errors import (
    EnvironmentUnknown,
    QuotaExhausted,
    SandboxGone,
    SandboxUnavailable,
    ServiceError,
    TooLarge,
    WrongRequest,
)

__all__ = ["sdk_errors", "translated"]

# By class, the more special ones first.
_BY_CLASS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], type[ServiceError]], ...] = (
    ((SandboxNotRunningException, SandboxNotFoundException), SandboxGone),
    (RateLimitException, QuotaExhausted),
    (NotEnoughSpaceException, TooLarge),
    ((FileNotFoundException, InvalidArgumentException), WrongRequest),
    ((ServiceBusyException, AuthenticationException), SandboxUnavailable),
    ((BuildException, TemplateException), SandboxUnavailable),
)
_BY_STATUS = {
    400: WrongRequest,
    404: EnvironmentUnknown,
    409: WrongRequest,
    413: TooLarge,
    422: WrongRequest,
}
# Another try would end the same way.
_LASTING = (AuthenticationException, BuildException, TemplateException)


def translated(error: Exception, what: str, *, retry_after_s: float = 1.0) -> ServiceError | None:
    """The error of ours that an exception of the SDK stands for; None if it is none of the SDK's.

    Args:
        error: As raised. That a command failed is no error.
        what: What was tried, for the message: "making a sandbox".
        retry_after_s: What a quota error asks to wait. The SDK waits by `Retry-After` itself
            before it gives up, and does not tell the time.
    """
    if isinstance(error, CommandExitException):
        return None
    kind = next((ours for theirs, ours in _BY_CLASS if isinstance(error, theirs)), None)
    if kind is None and isinstance(error, SandboxException):
        kind = _BY_STATUS.get(error.status_code or 0)
    if kind is None:
        # Timeouts, unreachable sandboxes, dropped connections, and what has no name of its own.
        if not isinstance(error, SandboxException | httpx.HTTPError | OSError):
            return None
        kind = SandboxUnavailable
    waits = kind is QuotaExhausted or isinstance(error, ServiceBusyException)
    return kind(
        f"{what}: {error}",
        retryable=False if isinstance(error, _LASTING) else None,
        retry_after_s=retry_after_s if waits else None,
    )


@contextlib.contextmanager
def sdk_errors(what: str, *, retry_after_s: float = 1.0) -> Iterator[None]:
    """Raises what the body's SDK calls raise as errors of ours."""
    try:
        yield
    except ServiceError:
        raise
    except Exception as error:
        ours = translated(error, what, retry_after_s=retry_after_s)
        if ours is None:
            raise
        raise ours from error
