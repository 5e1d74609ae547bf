# ruff: noqa: N818 -- the classes are named as what they are, as service_kit's
"""The errors of weight-sync: when each is raised, and whether trying again can help."""


class WeightSyncError(Exception):
    """Anything this package refuses or fails at.

    `retryable` says whether a retry can help, `anchor_helps` whether a version sent whole can where
    this one does not arrive.
    """

    retryable = False
    anchor_helps = False


class ManifestError(WeightSyncError):
    """A manifest is truncated, of an unknown format, or contradicts itself."""

    anchor_helps = True


class ChecksumMismatch(WeightSyncError):
    """Bytes are not the ones the manifest names. Fetching them again can help."""

    retryable = True
    anchor_helps = True


class PayloadCorrupt(ChecksumMismatch):
    """A payload's structure makes no sense, so its tensors cannot even be compared."""


class PayloadMissing(WeightSyncError):
    """A file that a manifest or an announcement names is not there: pruned, or not visible yet."""

    retryable = True
    anchor_helps = True


class NotOffered(PayloadMissing):
    """A payload is not broadcast now, or the group was formed without this host."""


class TransportFailed(WeightSyncError):
    """Bytes did not arrive: a peer died, a group broke, a deadline passed."""

    retryable = True


class TransportUnavailable(WeightSyncError):
    """A transport needs something that is not installed or not configured here."""


class ShardMissing(WeightSyncError):
    """A rank did not write its shard in time, so its version was given up. Publish again."""

    retryable = True


class StoreFull(WeightSyncError):
    """The store's file system has no space left for a version."""

    retryable = True


class Fenced(WeightSyncError):
    """A newer incarnation publishes for this run; this publisher must stop."""


class NumberNotRising(WeightSyncError):
    """A version's number is not above every number announced before it."""


class AnchorRequired(WeightSyncError):
    """A delta was announced whose base this incarnation never announced; publish an anchor."""

    anchor_helps = True


class UnknownCodec(WeightSyncError):
    """A manifest names a codec that this receiver does not have."""

    anchor_helps = True


class IllegalTransition(WeightSyncError):
    """An engine's state has no such event: a bug in the caller."""


class EngineError(WeightSyncError):
    """An engine refused a call, answered nonsense, or did not answer in time."""

    retryable = True


class UnknownEngineKind(WeightSyncError):
    """No driver for this kind of engine."""


class BaseModelUnknown(WeightSyncError):
    """Nobody says where the model's config and tokenizer files are."""
