# ruff: noqa: N818 -- errors are named as what they are, as those of service_kit
"""What can go wrong in the trainer, as one tree.

None of these can be cured by calling again unchanged; each says what to change. At the service's
edge they become a `ServiceError` with the reason named here.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from service_kit.errors import Reason, ServiceError, StartupError, leaf_errors
from weight_sync.errors import WeightSyncError


class TrainerError(Exception):
    """Base of the trainer's own errors."""

    reason: ClassVar[Reason] = Reason.INTERNAL


class ModelError(TrainerError, StartupError):
    """The model folder is missing, incomplete, or of an architecture that is not trained here."""

    reason = Reason.INVALID_ARGUMENT


class CheckpointInvalid(TrainerError, StartupError):
    """A checkpoint is missing, truncated, altered, or of a format this code does not read.

    Name an older checkpoint, or start the stage anew under another name.
    """

    reason = Reason.CHECKPOINT_INVALID


class TraceError(TrainerError):
    """A line of a trace file is not a trajectory that can be trained on."""

    reason = Reason.INVALID_ARGUMENT


class RecipeError(TrainerError):
    """A stage's recipe is not valid."""

    reason = Reason.INVALID_ARGUMENT


class StageConflict(TrainerError):
    """It cannot be done while a stage is running."""

    reason = Reason.FAILED_PRECONDITION


class Stalled(TrainerError):
    """No group arrived, or every update was refused, for longer than the recipe allows.

    Look at the rollout engines' status; then start the stage again to go on from its checkpoint.
    """

    reason = Reason.UNAVAILABLE


class DiskFull(TrainerError):
    """A checkpoint or a log could not be written for lack of space.

    Free some and start the stage again; its last checkpoint is whole.
    """

    reason = Reason.DISK_FULL


class FencedOff(TrainerError):
    """A newer incarnation of the run publishes weights; this trainer must stop."""

    reason = Reason.FENCED


class RunConflict(TrainerError, StartupError):
    """The run folder holds another run, or one that may not be gone on with."""

    reason = Reason.FAILED_PRECONDITION


class UnknownStage(TrainerError):
    """No stage of this name exists, or it has no checkpoint yet."""

    reason = Reason.NOT_FOUND


class StageDiffers(TrainerError):
    """A stage of this name exists with another kind or recipe."""

    reason = Reason.ALREADY_EXISTS


_EXPECTED = (TrainerError, ServiceError, WeightSyncError, OSError, TimeoutError)


def is_expected(failure: BaseException) -> bool:
    """Say whether a failure, or each of a group, is one that its message explains, and no bug."""
    return all(isinstance(leaf, _EXPECTED) for leaf in leaf_errors(failure))


def explained(failure: BaseException) -> str:
    """Put a failure, or a group of them, into words."""
    leaves = [leaf for leaf in leaf_errors(failure) if not isinstance(leaf, asyncio.CancelledError)]
    texts = [str(e) if isinstance(e, _EXPECTED) else f"{type(e).__name__}: {e}" for e in leaves]
    return "; ".join(dict.fromkeys(text for text in texts if text)) or type(failure).__name__
