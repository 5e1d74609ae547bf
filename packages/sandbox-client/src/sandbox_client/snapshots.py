"""Making snapshots, and removing those that nobody needs any more."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence

from sandbox_client.backends.base import Backend, BackendSandbox
from sandbox_client.config import LimitsConfig
from sandbox_client.core.limits import LimiterStatus
from sandbox_client.core.snapshots import KeptSnapshot, SnapshotTable
from sandbox_client.errors import EnvironmentUnknown, QuotaExhausted, SandboxUnavailable
from sandbox_client.types import EnvironmentRef, SnapshotInfo

__all__ = ["Snapshots"]

logger = logging.getLogger(__name__)


class Snapshots:
    """All snapshots of one service. `reap` has to be called now and then."""

    def __init__(self, backend: Backend, limits: LimitsConfig, clock: Callable[[], float]) -> None:
        self._backend = backend
        self._limits = limits
        self._clock = clock
        self._table = SnapshotTable()
        self._pending: dict[str, asyncio.Future[None]] = {}

    async def make(
        self,
        sandbox_id: str,
        sandbox: BackendSandbox,
        key: str,
        *,
        lease_s: float,
        environment: EnvironmentRef,
    ) -> SnapshotInfo:
        """Keeps a sandbox's files, or finds what this key has kept before.

        Raises:
            QuotaExhausted: `limits.snapshots` or the back-end's space for them is used up.
            SandboxGone, SandboxUnavailable, TooLarge: it cannot be made.
        """
        new_id = f"sn-{secrets.token_hex(8)}"
        claim = self._table.claim(sandbox_id, key, new_id=new_id, now=self._clock())
        if claim.is_new:
            await self._make(claim.sandbox_id, sandbox, environment)
        elif claim.sandbox_id in self._pending:
            await asyncio.shield(self._pending[claim.sandbox_id])
        kept = self._table.grant(claim.sandbox_id, lease_s=lease_s, now=self._clock())
        if kept is None:
            raise SandboxUnavailable("the snapshot that this call waited for could not be made")
        return SnapshotInfo(claim.sandbox_id, lease_s, kept.size_bytes, kept.workdir)

    async def _make(
        self, snapshot_id: str, sandbox: BackendSandbox, environment: EnvironmentRef
    ) -> None:
        parent = environment.snapshot
        self._pending[snapshot_id] = asyncio.get_running_loop().create_future()
        self._table.hold_parent(parent)
        try:
            self._admit()
            size_bytes = await sandbox.snapshot(snapshot_id)
        except BaseException:
            self._table.let_go(parent)
            self._table.abandon(snapshot_id)
            raise
        else:
            kept = KeptSnapshot(environment.workdir, environment.env, size_bytes, parent)
            self._table.keep(snapshot_id, kept)
        finally:
            self._pending.pop(snapshot_id).set_result(None)

    def _admit(self) -> None:
        if len(self._table) > self._limits.snapshots:
            raise QuotaExhausted(
                f"limits.snapshots allows {self._limits.snapshots} snapshots; retry when the "
                "lease of one has ended",
                retry_after_s=self._limits.retry_after_s,
            )

    def hold(self, snapshot_id: str) -> KeptSnapshot:
        """What to start a sandbox from; `let_go` once that sandbox is gone.

        Raises:
            EnvironmentUnknown: there is no such snapshot, or its lease is over.
        """
        kept = self._table.hold(snapshot_id, self._clock())
        if kept is None:
            raise EnvironmentUnknown(
                f"no snapshot {snapshot_id!r} is kept: it was destroyed, its lease ran out, or the "
                "service was restarted; prepare a sandbox and snapshot it again",
                metadata={"snapshot": snapshot_id},
            )
        return kept

    def let_go(self, snapshot_id: str) -> None:
        """A sandbox that started from it is gone."""
        self._table.let_go(snapshot_id)

    def renew(self, snapshot_ids: Sequence[str], lease_s: float) -> list[str]:
        """Prolongs leases; returns the ids that are gone."""
        return self._table.renew(snapshot_ids, lease_s=lease_s, now=self._clock())

    async def destroy(self, snapshot_id: str) -> bool:
        """Ends a lease; False if there was none."""
        ended = self._table.end(snapshot_id)
        await self.reap()
        return ended

    async def reap(self) -> None:
        """Removes what nobody needs."""
        while gone := self._table.take_removable(self._clock()):
            for snapshot_id in gone:
                try:
                    await self._backend.remove_snapshot(snapshot_id)
                except (OSError, SandboxUnavailable) as error:
                    logger.warning("snapshot %s cannot be removed: %s", snapshot_id, error)

    def status(self) -> LimiterStatus:
        """How many there are."""
        return LimiterStatus("snapshots", float(self._limits.snapshots), float(len(self._table)))
