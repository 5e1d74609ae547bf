"""Values that cross this package's rooms and its wire."""

from collections.abc import Sequence
from dataclasses import dataclass

from weight_sync.core.manifest import PolicyVersion
from weight_sync.core.registry import (
    EngineEndpoint,
    EngineReport,
    Needed,
    NodeView,
    Serving,
)

__all__ = [
    "AnnouncedVersion",
    "EngineEndpoint",
    "EngineReport",
    "Grant",
    "Needed",
    "NodeView",
    "Nodes",
    "PolicyVersion",
    "Serving",
    "Versions",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnouncedVersion:
    """A version that the service has made known."""

    version: PolicyVersion
    manifest_uri: str
    payload_bytes: int
    base: int = 0
    """Number of the version the payload is a delta of; 0: a full anchor."""
    traceparent: str = ""
    """The trace of the optimizer step that made it."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The right to publish for a run, until a newer incarnation is granted."""

    incarnation: int
    last_number: int
    """Publish numbers above this one."""
    store_uri: str


@dataclass(frozen=True, slots=True)
class Versions:
    """A run's announced versions, oldest first."""

    versions: Sequence[AnnouncedVersion]
    incarnation: int


@dataclass(frozen=True, slots=True)
class Nodes:
    """The live nodes, and the newest version of the current run (0: none)."""

    nodes: Sequence[NodeView]
    newest_version: int
