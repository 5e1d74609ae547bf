"""The choices that make up an objective, by name. The losses read them, and so do recipes."""

from __future__ import annotations

import enum


class AdvantageKind(enum.StrEnum):
    """How rewards of a group become advantages."""

    STD = "std"
    """(reward - mean) / (standard deviation + epsilon): GRPO."""
    MEAN = "mean"
    """reward - mean: no division, so hard and easy groups weigh by their spread (Dr. GRPO)."""
    LEAVE_ONE_OUT = "leave_one_out"
    """reward - mean of the other attempts: an unbiased baseline (RLOO)."""


class RatioKind(enum.StrEnum):
    """What is clipped."""

    TOKEN = "token"  # noqa: S105
    """The ratio of each token (GRPO, PPO)."""
    SEQUENCE = "sequence"
    """The geometric mean over the attempt's tokens (GSPO)."""
    CISPO = "cispo"
    """The weight of the gradient, not the loss: no token's gradient is lost (CISPO)."""


class Aggregation(enum.StrEnum):
    """What is averaged over."""

    TOKEN_MEAN = "token_mean"  # noqa: S105
    """All tokens alike: long attempts weigh more (DAPO)."""
    SEQUENCE_MEAN = "sequence_mean"
    """All attempts alike: a token of a long attempt weighs less (GRPO)."""
    FIXED_LENGTH = "fixed_length"
    """Sum of the tokens over attempts times a constant length: no length bias (Dr. GRPO)."""


class CorrectionWeight(enum.StrEnum):
    """What the loss of a token is multiplied by, for having been sampled by another policy."""

    NONE = "none"
    """1."""
    TOKEN = "token"  # noqa: S105
    """Proximal over behaviour of the token, truncated: TIS."""
    SEQUENCE = "sequence"
    """The product over the attempt's tokens, truncated."""


class CorrectionMask(enum.StrEnum):
    """Which tokens are left out, for having moved too far."""

    NONE = "none"
    """None is."""
    TOKEN = "token"  # noqa: S105
    """Tokens whose ratio is outside the band: IcePop."""
    SEQUENCE = "sequence"
    """Attempts whose product of ratios is outside the band: MIS."""
    GEOMETRIC = "geometric"
    """Attempts whose geometric mean of ratios is outside the band."""
