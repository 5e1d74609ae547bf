"""What a driver is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from weight_sync.core.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Observation:
    """What an engine says of itself."""

    label: str
    """Its `weight_version`."""
    base_model: Path | None
    """The folder it was started with, where the tokenizer is; None: it does not say."""


@dataclass(frozen=True, slots=True)
class Activation:
    """What bringing one engine to a version took."""

    pause_s: float
    """From asking it to pause until it generates again."""
    load_s: float
    verify_s: float


class EngineDriver(Protocol):
    """One engine. Every method has its own deadline and raises `EngineError`."""

    async def observe(self) -> Observation:
        """Ask what it holds. Light: called once a second."""
        ...

    async def activate(self, folder: Path, manifest: Manifest) -> Activation:
        """Pause, load the folder under the version's label, verify, continue.

        When it fails the engine stays paused if it can be: its weights may be torn.
        """
        ...

    async def verify(self, manifest: Manifest) -> None:
        """Compare the engine's own weights with a manifest.

        Raises:
            ChecksumMismatch: they differ.
        """
        ...

    async def resume(self) -> None:
        """Let it generate, whether or not it was paused."""
        ...

    async def close(self) -> None:
        """Free what the driver holds; the engine is left as it is."""
        ...
