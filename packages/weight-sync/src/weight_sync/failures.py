"""The errors of this package in the words of the contract."""

from service_kit.errors import Reason, ServiceError, service_error

from weight_sync import errors

_REASONS: tuple[tuple[type[errors.WeightSyncError], Reason], ...] = (
    (errors.Fenced, Reason.FENCED),
    (errors.NumberNotRising, Reason.ALREADY_EXISTS),
    (errors.AnchorRequired, Reason.STALE_BASE_VERSION),
    (errors.PayloadMissing, Reason.NOT_FOUND),
    (errors.ChecksumMismatch, Reason.CHECKSUM_MISMATCH),
    (errors.StoreFull, Reason.DISK_FULL),
    (errors.ManifestError, Reason.INVALID_ARGUMENT),
)


def service_failure(error: errors.WeightSyncError) -> ServiceError:
    """Return the error that goes over the wire."""
    reason = next((r for kind, r in _REASONS if isinstance(error, kind)), Reason.INTERNAL)
    return service_error(reason, str(error), retryable=error.retryable)
