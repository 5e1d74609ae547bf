# ruff: noqa: N818 -- errors are named as what they are, as those of service_kit
"""What can go wrong in the trainer, as one tree.

None of these can be cured by calling again unchanged; each says what to change. At the service's
edge they become a `ServiceError` with the reason named here.
"""

from __future__ import annotations

from typing import ClassVar

from service_kit.errors import Reason, StartupError


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
    """A stage of this name exists and differs, or another stage is running."""

    reason = Reason.FAILED_PRECONDITION


class Stalled(TrainerError):
    """No group arrived, or every update was refused, for longer than the recipe allows.

    Look at the rollout engines' status; then start the stage again to go on from its checkpoint.
    """

    reason = Reason.UNAVAILABLE
