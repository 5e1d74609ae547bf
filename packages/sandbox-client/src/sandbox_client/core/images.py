"""Which images a full disk can do without."""

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["DiskUse", "KnownImage", "removal_order"]


@dataclass(frozen=True, slots=True)
class DiskUse:
    """How full a file system is."""

    total_bytes: int
    free_bytes: int
    """What its users can still write."""

    @property
    def share(self) -> float:
        """The part in use, 0 to 1."""
        return 1 - self.free_bytes / self.total_bytes if self.total_bytes else 0.0


@dataclass(frozen=True, slots=True)
class KnownImage:
    """An image that this service has pulled."""

    image_id: str
    used_at: float
    """When a sandbox last started from it, or when it was pulled."""
    in_use: bool
    """A container stands on it, or it is asked for right now."""


def removal_order(images: Iterable[KnownImage]) -> list[str]:
    """Ids of the images that may go, the longest unused first."""
    idle = sorted((i.used_at, i.image_id) for i in images if not i.in_use)
    return [image_id for _, image_id in idle]
