"""The invariant, seen from outside: an engine that reports v holds exactly v, or reports nothing.

It knows of a system no more than what was published and what its engines say and hold, so the same
checker judges weight-sync, a simulation of it, and receivers that are known to tear.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from weight_sync.core.manifest import Manifest, digest

UNVERSIONED = ("default",)
"""What an engine reports that was never updated: no version."""


class Checker:
    """Collects every observation that contradicts what was published."""

    def __init__(self, unversioned: Collection[str] = UNVERSIONED) -> None:
        self.violations: list[str] = []
        self.looks = 0
        self._unversioned = unversioned
        self._roots: dict[str, str] = {}

    def published(self, label: str, checksums: Mapping[str, str]) -> None:
        """Take note of what a version holds; a label that comes again must hold the same."""
        root = root_of(checksums)
        if self._roots.setdefault(label, root) != root:
            self.violations.append(f"version {label} was published twice, with other bytes")

    def published_manifest(self, manifest: Manifest) -> None:
        """Take note of a version by its manifest."""
        self.published(manifest.version.label, {t.name: t.checksum for t in manifest.tensors})

    def looked(self, who: str, label: str, checksums: Mapping[str, str]) -> None:
        """Judge an engine that generates, or of which a receiver claims that it holds `label`."""
        self.looks += 1
        if label in self._unversioned:
            return
        known = self._roots.get(label)
        if known is None:
            self.violations.append(f"{who} reports version {label}, which nobody published")
        elif known != root_of(checksums):
            self.violations.append(f"{who} reports version {label} and holds other bytes")


def root_of(checksums: Mapping[str, str]) -> str:
    """Hash a whole model by its tensors' names and checksums."""
    return digest("\n".join(f"{name} {c}" for name, c in sorted(checksums.items())).encode())
