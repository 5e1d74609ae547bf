"""One engine of a host, and what its receiver knows of it."""

from dataclasses import dataclass, field
from pathlib import Path

from weight_sync.core.receiver import EngineState, Phase
from weight_sync.drivers import EngineDriver
from weight_sync.types import EngineEndpoint, EngineReport


@dataclass(slots=True)
class Engine:
    """One engine of this host, and what the receiver knows of it."""

    endpoint: EngineEndpoint
    driver: EngineDriver
    state: EngineState = field(default_factory=EngineState)
    label: str | None = None
    """What it said last; None: it did not answer."""
    base_model: Path | None = None
    failures: int = 0
    retry_at_s: float = 0.0
    prepare_s: float = 0.0
    activate_s: float = 0.0
    pause_s: float = 0.0
    payload_bytes: int = 0

    def is_activating(self) -> bool:
        """Whether the receiver has its hands on the engine's weights now."""
        return self.state.phase is Phase.ACTIVATING

    def report(self) -> EngineReport:
        """Return what the service is told of it."""
        state = self.state
        return EngineReport(
            url=self.endpoint.url,
            kind=self.endpoint.kind,
            phase=state.phase,
            version=state.held.number if state.held else 0,
            target_version=state.target.number if state.target else 0,
            prepare_s=self.prepare_s,
            activate_s=self.activate_s,
            pause_s=self.pause_s,
            payload_bytes=self.payload_bytes,
            error=state.error,
        )
