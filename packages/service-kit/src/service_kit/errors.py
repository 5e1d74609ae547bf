# ruff: noqa: N818 -- the classes carry the names of the gRPC status codes they stand for
"""One tree of errors for every call between services.

A handler raises a `ServiceError`; the server sends it as `google.rpc.Status` with an `ErrorInfo`
(reason, domain, metadata) and, if a retry can help, a `RetryInfo`; the caller's channel raises an
equal `ServiceError` again. Callers branch on the class or on `reason`, never on the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import grpc
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from service_kit.reasons import REASON_TRAITS as REASON_TRAITS
from service_kit.reasons import Reason as Reason

DOMAIN = "tailrace"
"""`ErrorInfo.domain` of every error this library sends."""

STATUS_DETAILS_KEY = "grpc-status-details-bin"
RETRY_PUSHBACK_KEY = "grpc-retry-pushback-ms"

# gRPC drops trailers above 8 KiB and reports RESOURCE_EXHAUSTED in place of the error. The message
# travels twice, once of them percent-encoded, so the whole has to stay far below that.
MAX_MESSAGE_BYTES = 1024
MAX_METADATA_BYTES = 2048


class StartupError(Exception):
    """A service cannot start as told, and the operator can mend it.

    Raise it (or a subclass) before serving for a missing file, a used port, a bad setting. The
    command line prints its message alone and exits with code 2.
    """


class ServiceError(Exception):
    """A call that was refused or failed, on either side of it.

    Args:
        message: What happened, what was expected and found, and what to do next.
        reason: The closed-set reason. Defaults to the class's own.
        retryable: Whether the same call can succeed later. Defaults to the reason's trait. It does
            not say that a retry is safe: only idempotent calls may be repeated.
        retry_after_s: Least time to wait before the next try, in seconds.
        metadata: Short facts for programs, such as `{"have": "41", "need": "42"}`.
        domain: Who defined the reason; another value than `DOMAIN` marks a foreign error.
    """

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    default_reason: ClassVar[Reason] = Reason.UNSPECIFIED

    def __init__(
        self,
        message: str,
        *,
        reason: Reason | None = None,
        retryable: bool | None = None,
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        domain: str = DOMAIN,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = self.default_reason if reason is None else reason
        traits = REASON_TRAITS[self.reason]
        if type(self) is ServiceError:
            self.code = traits.code
        self.retryable = traits.retryable if retryable is None else retryable
        self.retry_after_s = retry_after_s
        self.metadata = dict(metadata or {})
        self.domain = domain

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.message!r}, reason={self.reason.value}, "
            f"retryable={self.retryable})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        keywords = {
            "reason": self.reason,
            "retryable": self.retryable,
            "retry_after_s": self.retry_after_s,
            "metadata": self.metadata,
            "domain": self.domain,
        }
        return _rebuild, (type(self), self.message, keywords)


def _rebuild(kind: type[ServiceError], message: str, keywords: dict[str, Any]) -> ServiceError:
    return kind(message, **keywords)


class InvalidArgument(ServiceError):
    """The request itself is wrong; the same request never succeeds."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = Reason.INVALID_ARGUMENT


class NotFound(ServiceError):
    """The thing named does not exist, or no longer."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = Reason.NOT_FOUND


class AlreadyExists(ServiceError):
    """A different thing holds this key already."""

    code = grpc.StatusCode.ALREADY_EXISTS
    default_reason = Reason.ALREADY_EXISTS


class FailedPrecondition(ServiceError):
    """The request is right but the state is not; `reason` says which state is needed."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = Reason.FAILED_PRECONDITION


class Unauthenticated(ServiceError):
    """Credentials are missing or wrong."""

    code = grpc.StatusCode.UNAUTHENTICATED
    default_reason = Reason.UNAUTHENTICATED


class DeadlineExceeded(ServiceError):
    """Time ran out, or a stream was silent for too long; the work may or may not have happened."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = Reason.DEADLINE_EXCEEDED


class Cancelled(ServiceError):
    """The other side cancelled the work. A local cancellation is `asyncio.CancelledError`."""

    code = grpc.StatusCode.CANCELLED
    default_reason = Reason.CANCELLED


class Unavailable(ServiceError):
    """The service cannot be reached or takes no work now."""

    code = grpc.StatusCode.UNAVAILABLE
    default_reason = Reason.UNAVAILABLE


class ResourceExhausted(ServiceError):
    """A limit is used up. With `retry_after_s` the service says when to come back."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = Reason.QUOTA_EXHAUSTED


class Aborted(ServiceError):
    """The work was given up half way, by a conflict or an injected fault."""

    code = grpc.StatusCode.ABORTED
    default_reason = Reason.UNAVAILABLE


class OutOfRange(ServiceError):
    """A cursor or position is outside what is kept."""

    code = grpc.StatusCode.OUT_OF_RANGE
    default_reason = Reason.CURSOR_EXPIRED


class Unimplemented(ServiceError):
    """The method exists in the contract but not here."""

    code = grpc.StatusCode.UNIMPLEMENTED
    default_reason = Reason.UNIMPLEMENTED


class DataLoss(ServiceError):
    """Bytes arrived or were stored wrong."""

    code = grpc.StatusCode.DATA_LOSS
    default_reason = Reason.CHECKSUM_MISMATCH


class Internal(ServiceError):
    """A bug of the service; its log has the traceback."""

    code = grpc.StatusCode.INTERNAL
    default_reason = Reason.INTERNAL


_CLASS_BY_CODE: Mapping[grpc.StatusCode, type[ServiceError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument,
        NotFound,
        AlreadyExists,
        FailedPrecondition,
        Unauthenticated,
        DeadlineExceeded,
        Cancelled,
        Unavailable,
        ResourceExhausted,
        Aborted,
        OutOfRange,
        Unimplemented,
        DataLoss,
        Internal,
    )
}
_CODE_BY_NUMBER: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
# Statuses that gRPC itself or a foreign server makes, without an ErrorInfo of ours.
_BARE_CODES: Mapping[grpc.StatusCode, Reason] = {
    grpc.StatusCode.UNKNOWN: Reason.INTERNAL,
    grpc.StatusCode.PERMISSION_DENIED: Reason.UNAUTHENTICATED,
    grpc.StatusCode.OUT_OF_RANGE: Reason.INVALID_ARGUMENT,
    grpc.StatusCode.DATA_LOSS: Reason.INTERNAL,
}


def service_error(reason: Reason, message: str, **details: Any) -> ServiceError:
    """Make the error of the class that belongs to `reason`; `details` as for `ServiceError`."""
    kind = _CLASS_BY_CODE.get(REASON_TRAITS[reason].code, ServiceError)
    return kind(message, reason=reason, **details)


def leaf_errors(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, or what an exception group holds, at any depth."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaf_errors(inner)
    else:
        yield error


def status_from_error(error: ServiceError) -> status_pb2.Status:
    """Encode an error as `google.rpc.Status`, shortened to fit into gRPC's trailers."""
    status = status_pb2.Status(
        code=error.code.value[0], message=_shortened(error.message, MAX_MESSAGE_BYTES)
    )
    metadata: dict[str, str] = {}
    room = MAX_METADATA_BYTES
    for key, value in error.metadata.items():
        room -= len(key)
        if room <= 0:
            break
        metadata[key] = _shortened(value, room)
        room -= len(metadata[key].encode())
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(
            reason=error.reason.value, domain=error.domain, metadata=metadata
        )
    )
    if error.retryable:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round((error.retry_after_s or 0.0) * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def _shortened(text: str, limit_bytes: int) -> str:
    # gRPC percent-encodes what is not printable ASCII: count such a byte as three.
    size = 0
    for kept, character in enumerate(text):
        raw = character.encode(errors="replace")
        size += 1 if len(raw) == 1 and 0x20 <= raw[0] <= 0x7E else 3 * len(raw)
        if size > limit_bytes:
            return text[: max(0, kept - 3)] + "..."
    return text


def error_from_rpc(error: grpc.aio.AioRpcError, *, where: str = "") -> ServiceError:
    """Decode what a call failed with.

    Args:
        error: As raised by a plain `grpc.aio` channel.
        where: Method and target; becomes part of a transport's message, and a note on others.
    """
    status = _rich_status(error)
    if status is not None:
        decoded = _from_status(status)
        if decoded is not None:
            if where:
                decoded.add_note(f"raised by {where}")
            return decoded
    code = error.code()
    # A cancellation of ours is `asyncio.CancelledError`, and a service's own has an ErrorInfo: this
    # one comes from a server that went away with the call in its queue.
    meant = grpc.StatusCode.UNAVAILABLE if code is grpc.StatusCode.CANCELLED else code
    kind = _CLASS_BY_CODE.get(meant, ServiceError)
    details = error.details() or code.name
    reason = _BARE_CODES.get(code, kind.default_reason)
    retryable = REASON_TRAITS[reason].retryable
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        reason, retryable = Reason.TOO_LARGE, False
    message = f"{where}: {details}" if where else details
    made = kind(message, reason=reason, retryable=retryable, domain="")
    made.code = code
    return made


def _rich_status(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    trailers: Any = error.trailing_metadata()
    for key, value in trailers or ():
        if key == STATUS_DETAILS_KEY:
            status = status_pb2.Status.FromString(value)
            # A proxy may have replaced the status and kept the trailer: believe the status.
            return status if status.code == error.code().value[0] else None
    return None


def _from_status(status: status_pb2.Status) -> ServiceError | None:
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    found_info = found_retry = False
    for detail in status.details:
        if detail.Unpack(info):
            found_info = True
        elif detail.Unpack(retry):
            found_retry = True
    if not found_info:
        return None
    code = _CODE_BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN)
    kind = _CLASS_BY_CODE.get(code, ServiceError)
    metadata = dict(info.metadata)
    known = info.reason in Reason.__members__
    if not known:
        # From a newer peer, or a foreign domain: keep what it said for the log.
        metadata["reason"] = info.reason
    delay_s = retry.retry_delay.ToNanoseconds() / 1e9
    made = kind(
        status.message,
        reason=Reason[info.reason] if known else _BARE_CODES.get(code, kind.default_reason),
        retryable=found_retry,
        retry_after_s=delay_s if delay_s > 0 else None,
        metadata=metadata,
        domain=info.domain,
    )
    made.code = code
    return made
