"""Engines that sample from the policy: SGLang's API, its client, the fleet, the embedded engine.

    async with Fleet(FleetConfig(urls=("http://127.0.0.1:7201",))) as fleet:
        result = await fleet.generate(request)

`engines.cpu` is the embedded engine, `engines.scripted` one without a model for tests.
"""

from __future__ import annotations

from rollout_engine.engines.errors import (
    BadReply,
    EngineBusy,
    EngineError,
    EnginePoisoned,
    EngineTimeout,
    EngineUnavailable,
    GenerationAborted,
    InvalidRequest,
    WeightUpdateFailed,
)
from rollout_engine.engines.fleet import Fleet, FleetConfig
from rollout_engine.engines.sglang import SglangClient
from rollout_engine.engines.types import (
    EngineLoad,
    EngineRequest,
    Finish,
    FinishKind,
    Generation,
    LabelSpan,
    ModelInfo,
    PauseMode,
    SamplingParams,
    WeightsChecksum,
)

__all__ = [
    "BadReply",
    "EngineBusy",
    "EngineError",
    "EngineLoad",
    "EnginePoisoned",
    "EngineRequest",
    "EngineTimeout",
    "EngineUnavailable",
    "Finish",
    "FinishKind",
    "Fleet",
    "FleetConfig",
    "Generation",
    "GenerationAborted",
    "InvalidRequest",
    "LabelSpan",
    "ModelInfo",
    "PauseMode",
    "SamplingParams",
    "SglangClient",
    "WeightUpdateFailed",
    "WeightsChecksum",
]
