"""This package's own errors. Failed calls between services are `ServiceError`."""

from __future__ import annotations

from service_kit.errors import StartupError


class RolloutError(Exception):
    """Base of the errors that this package defines.

    Attributes:
        retryable: Whether the same action can succeed later, without anybody's help.
    """

    retryable = False


class TemplateError(RolloutError, StartupError):
    """A model folder's chat template or tokenizer cannot be used. No retry helps."""


class LedgerError(RolloutError):
    """The ledger cannot do what was asked of it."""


class LedgerDiskFullError(LedgerError):
    """The ledger's disk is full. Nothing is lost: what was to be written is still in memory.

    Free some space; the engine tries again by itself.
    """

    retryable = True


class LedgerCorruptError(LedgerError):
    """Stored bytes are missing or not those that were written: the disk lost or changed them."""


class LedgerUnusableError(LedgerError, StartupError):
    """The ledger's folder cannot be used: held by another engine, or of an unknown version."""
