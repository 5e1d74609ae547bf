"""What the HTTP API needs of anything that can generate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rollout_engine.engines.types import (
    EngineLoad,
    EngineRequest,
    Generation,
    ModelInfo,
    PauseMode,
    WeightsChecksum,
)
from rollout_engine.engines.wire import Json

Report = Callable[[Generation], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """What `/update_weights_from_disk` asks for.

    Attributes:
        label: The new weights' version; None keeps the present label.
        flush_cache: Drop kept prefixes.
        root_hash: Refuse weights with another root hash than this; None accepts any. SGLang doesn't
            have this field.
    """

    model_path: str
    label: str | None = None
    flush_cache: bool = True
    abort_all: bool = False
    root_hash: str | None = None


class EngineBackend(Protocol):
    """What the API needs of an engine. All methods are called in the event loop's thread."""

    async def generate(
        self, request: EngineRequest, sample_index: int, report: Report | None
    ) -> Generation:
        """Generate one sample; call `report` after every token if it is given.

        Raises:
            InvalidRequest, EngineBusy, EnginePoisoned.
        """
        ...

    def abort(self, rid: str | None) -> None:
        """End a request, or all, with what they have."""
        ...

    def pause(self, mode: PauseMode) -> None:
        """Stop generating."""
        ...

    def resume(self) -> None:
        """Go on generating."""
        ...

    async def update_weights(self, update: WeightUpdate) -> int:
        """Load other weights and return the number of paused requests.

        Raises:
            WeightUpdateFailed: nothing has changed.
            EnginePoisoned: something has.
        """
        ...

    def relabel(self, label: str) -> None:
        """Give the present weights another version label."""
        ...

    def flush(self) -> bool:
        """Drop kept prefixes if nothing is in flight; return whether that was so."""
        ...

    def ailment(self) -> str:
        """Return why the engine must not be used, or nothing."""
        ...

    def model_info(self) -> ModelInfo:
        """Return what is served."""
        ...

    def load(self) -> EngineLoad:
        """Return how busy the engine is."""
        ...

    def server_info(self) -> Json:
        """Return settings and limits, with `version` and `max_req_input_len` among them."""
        ...

    async def checksum(self) -> WeightsChecksum:
        """Hash the weights in memory."""
        ...


__all__ = ["EngineBackend", "Report", "WeightUpdate"]
