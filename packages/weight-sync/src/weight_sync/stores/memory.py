"""A store in memory that the processes of one host share: `shm://NAME`.

It is a folder of `/dev/shm`: what is written there is in memory and nowhere else, outlives its
writer, and is mapped by readers without a copy. Nothing needs syncing: a power cut takes it all.
A payload is written into the memory of one that was deleted, see `spares`.
"""

import re

from weight_sync.stores.base import Step, no_step
from weight_sync.stores.folder import SHARED_MEMORY, FolderStore

SCHEME = "shm"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


class MemoryStore(FolderStore):
    """Versions in `/dev/shm`. Its manifests have `file://` URIs, as any folder's."""

    def __init__(self, name: str, *, on_step: Step = no_step) -> None:
        """Use the store of this name on this host.

        Raises:
            ValueError: it is no name, or this host has no `/dev/shm`.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"expected {SCHEME}:// and a name of letters, digits, '.', '_' and '-', found "
                f"{name!r}"
            )
        if not SHARED_MEMORY.is_dir():
            raise ValueError(f"this host has no {SHARED_MEMORY}; use a folder on a disk")
        super().__init__(
            SHARED_MEMORY / f"tailrace-{name}", sync=False, recycle=True, on_step=on_step
        )
        self._name = name

    @property
    def uri(self) -> str:
        """`shm://` and the name."""
        return f"{SCHEME}://{self._name}"
