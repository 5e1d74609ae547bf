"""Snapshots of sandboxes, kept at E2B under names that tell whose they are."""

import logging

from e2b import E2B, AsyncSandbox, SnapshotInfo

from sandbox_client.backends.e2b.config import E2BConfig
from sandbox_client.backends.e2b.errors import sdk_errors
from sandbox_client.errors import EnvironmentUnknown, ServiceError

__all__ = ["SnapshotShelf"]

logger = logging.getLogger(__name__)


class SnapshotShelf:
    """The snapshots of one service. What an earlier run left is removed by `open`."""

    def __init__(self, client: E2B, config: E2BConfig) -> None:
        self._client = client
        self._config = config
        self._prefix = ""
        self._kept: dict[str, str] = {}

    async def open(self, service_id: str) -> None:
        """Removes the snapshots of an earlier run, which nobody can name any more."""
        self._prefix = f"{self._config.template_prefix}-kept-{service_id}-"
        pages = self._client.AsyncSandbox.list_snapshots()
        left: list[str] = []
        with sdk_errors("listing snapshots"):
            while pages.has_next:
                found = await pages.next_items()
                left += [snapshot.snapshot_id for snapshot in found if self._is_ours(snapshot)]
        for remote_id in left:
            await self._delete(remote_id)

    def _is_ours(self, found: SnapshotInfo) -> bool:
        # E2B may put the account's name before it.
        return any(name.rpartition("/")[2].startswith(self._prefix) for name in found.names)

    async def make(self, remote: AsyncSandbox, snapshot_id: str) -> None:
        """Keeps a sandbox's files; its processes too where the settings say so."""
        with sdk_errors(f"making a snapshot of sandbox {remote.sandbox_id}"):
            made = await remote.create_snapshot(
                name=self._prefix + snapshot_id,
                mode="full" if self._config.snapshot_memory else "filesystem",
            )
        self._kept[snapshot_id] = made.snapshot_id

    def template(self, snapshot_id: str) -> str:
        """What sandboxes start from to be like the one that was kept.

        Raises:
            EnvironmentUnknown: there is no such snapshot.
        """
        found = self._kept.get(snapshot_id)
        if found is None:
            raise EnvironmentUnknown(f"there is no snapshot {snapshot_id}; make it again")
        return found

    async def remove(self, snapshot_id: str) -> None:
        """Removes a snapshot, if there is one."""
        remote_id = self._kept.pop(snapshot_id, None)
        if remote_id is not None:
            await self._delete(remote_id)

    async def close(self) -> None:
        """Removes all of them."""
        for snapshot_id in list(self._kept):
            await self.remove(snapshot_id)

    async def _delete(self, remote_id: str) -> None:
        try:
            with sdk_errors(f"removing snapshot {remote_id}"):
                await self._client.AsyncSandbox.delete_snapshot(remote_id)
        except ServiceError as error:
            logger.warning("%s", error)
