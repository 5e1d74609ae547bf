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
